// The released Java SDK of EventMesh over gRPC: java -cp ... Grpc.java HOST PORT TOPIC. Each line is a result.

import io.cloudevents.CloudEvent;
import io.cloudevents.core.builder.CloudEventBuilder;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Collections;
import java.util.Optional;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.apache.eventmesh.client.grpc.config.EventMeshGrpcClientConfig;
import org.apache.eventmesh.client.grpc.consumer.EventMeshGrpcConsumer;
import org.apache.eventmesh.client.grpc.consumer.ReceiveMsgHook;
import org.apache.eventmesh.client.grpc.producer.EventMeshGrpcProducer;
import org.apache.eventmesh.common.EventMeshMessage;
import org.apache.eventmesh.common.enums.EventMeshProtocolType;
import org.apache.eventmesh.common.protocol.SubscriptionItem;
import org.apache.eventmesh.common.protocol.SubscriptionMode;
import org.apache.eventmesh.common.protocol.SubscriptionType;

class Grpc {

    static <T> T take(BlockingQueue<T> queue) throws Exception {
        T found = queue.poll(60, TimeUnit.SECONDS);
        if (found == null) {
            throw new IllegalStateException("nothing has come");
        }
        return found;
    }

    static void say(String name, Object value) {
        System.out.println("RESULT " + name + " " + value);
    }

    static EventMeshGrpcClientConfig config(String[] args, String group) {
        return EventMeshGrpcClientConfig.builder().serverAddr(args[0]).serverPort(Integer.parseInt(args[1]))
            .producerGroup("java-pub").consumerGroup(group).env("t").idc("d").sys("1234").userName("u").password("p")
            .build();
    }

    static EventMeshMessage message(String topic, String content) {
        return EventMeshMessage.builder().bizSeqNo("123").uniqueId("456").topic(topic).content(content).build()
            .addProp("ttl", "30000");
    }

    static <T> EventMeshGrpcConsumer consumer(String[] args, String group, String topic, SubscriptionType type,
        EventMeshProtocolType flavour, java.util.function.Function<T, Optional<T>> handle) {
        EventMeshGrpcConsumer consumer = new EventMeshGrpcConsumer(config(args, group));
        consumer.init();
        consumer.registerListener(new ReceiveMsgHook<T>() {
            public Optional<T> handle(T message) {
                return handle.apply(message);
            }

            public EventMeshProtocolType getProtocolType() {
                return flavour;
            }
        });
        consumer.subscribe(Collections.singletonList(new SubscriptionItem(topic, SubscriptionMode.CLUSTERING, type)));
        return consumer;
    }

    public static void main(String[] args) {
        try {
            run(args);
            System.exit(0);
        } catch (Throwable error) {
            error.printStackTrace();
            System.exit(1);  // the SDK's threads would keep the program
        }
    }

    static void run(String[] args) throws Exception {
        BlockingQueue<EventMeshMessage> heard = new LinkedBlockingQueue<>();
        EventMeshGrpcConsumer listener = Grpc.<EventMeshMessage>consumer(args, "java-grpc", "java-grpc",
            SubscriptionType.ASYNC, EventMeshProtocolType.EVENT_MESH_MESSAGE, found -> {
                heard.add(found);
                return Optional.empty();
            });
        BlockingQueue<CloudEvent> events = new LinkedBlockingQueue<>();
        Grpc.<CloudEvent>consumer(args, "java-grpc-ce", "java-grpc-ce", SubscriptionType.ASYNC,
            EventMeshProtocolType.CLOUD_EVENTS, found -> {
                events.add(found);
                return Optional.empty();
            });
        Grpc.<EventMeshMessage>consumer(args, "java-grpc-sync", "java-grpc-sync", SubscriptionType.SYNC,
            EventMeshProtocolType.EVENT_MESH_MESSAGE, found -> {
                found.setContent(found.getContent() + "!");
                return Optional.of(found);
            });
        EventMeshGrpcProducer producer = new EventMeshGrpcProducer(config(args, "none"));
        long deadline = System.currentTimeMillis() + 60000;
        EventMeshMessage reply = null;
        while (reply == null && System.currentTimeMillis() < deadline) {  // until the streams are subscribed
            reply = producer.requestReply(message("java-grpc-sync", "who"), 5000);
        }
        say("rr", reply.getContent());
        say("publish", producer.publish(message("java-grpc", "first")).getRespCode());
        EventMeshMessage first = take(heard);
        say("stream", first.getTopic() + " " + first.getContent());
        say("batch", producer.publish(Arrays.asList(message("java-grpc", "x"), message("java-grpc", "y"))).getRespCode());
        say("batched", take(heard).getContent() + take(heard).getContent());
        CloudEvent event = CloudEventBuilder.v1().withId("id").withSource(URI.create("/test")).withType("t")
            .withSubject("java-grpc-ce").withDataContentType("application/json")
            .withData("{\"a\":1}".getBytes(StandardCharsets.UTF_8)).withExtension("ttl", "30000").build();
        say("ce-publish", producer.publish(event).getRespCode());
        CloudEvent came = take(events);
        say("ce", came.getId() + " " + came.getSource() + " " + came.getSubject() + " "
            + new String(came.getData().toBytes(), StandardCharsets.UTF_8));
        say("rr-tcp", ((EventMeshMessage) producer.requestReply(message(args[2], "who"), 20000)).getContent());
        say("unsubscribe", listener.unsubscribe(Collections.singletonList(
            new SubscriptionItem("java-grpc", SubscriptionMode.CLUSTERING, SubscriptionType.ASYNC))).getRespCode());
    }
}
