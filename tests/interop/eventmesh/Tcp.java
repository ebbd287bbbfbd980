// The released Java SDK of EventMesh against a server: java -cp ... Tcp.java HOST PORT. Each line is a result.

import io.cloudevents.CloudEvent;
import io.cloudevents.core.builder.CloudEventBuilder;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Optional;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.apache.eventmesh.client.tcp.EventMeshTCPClient;
import org.apache.eventmesh.client.tcp.EventMeshTCPClientFactory;
import org.apache.eventmesh.client.tcp.conf.EventMeshTCPClientConfig;
import org.apache.eventmesh.common.protocol.SubscriptionMode;
import org.apache.eventmesh.common.protocol.SubscriptionType;
import org.apache.eventmesh.common.protocol.tcp.EventMeshMessage;
import org.apache.eventmesh.common.protocol.tcp.Package;
import org.apache.eventmesh.common.protocol.tcp.UserAgent;

class Tcp {

    static String host;
    static int port;

    static <T> EventMeshTCPClient<T> client(Class<T> flavour, String purpose, String group) throws Exception {
        UserAgent agent = UserAgent.builder().env("test").subsystem("5023").path("/p").pid(32893).host("localhost")
            .port(8362).version("2.0").username("u").password("p").idc("FT").group(group).purpose(purpose).build();
        EventMeshTCPClient<T> client = EventMeshTCPClientFactory.createEventMeshTCPClient(
            EventMeshTCPClientConfig.builder().host(host).port(port).userAgent(agent).build(), flavour);
        client.init();
        return client;
    }

    static EventMeshMessage message(String topic, String body) {
        EventMeshMessage message = new EventMeshMessage();
        message.setTopic(topic);
        message.setBody(body);
        message.setHeaders(new HashMap<>());
        message.setProperties(new HashMap<>());
        message.getProperties().put("ttl", "30000");
        message.getProperties().put("keys", "k");
        return message;
    }

    static CloudEvent event(String topic, String body) {
        return CloudEventBuilder.v1().withId("id-" + body).withSource(URI.create("/test")).withType("t")
            .withSubject(topic).withDataContentType("application/cloudevents+json")
            .withData(body.getBytes(StandardCharsets.UTF_8)).withExtension("ttl", "30000").build();
    }

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
        host = args[0];
        port = Integer.parseInt(args[1]);

        BlockingQueue<EventMeshMessage> heard = new LinkedBlockingQueue<>();
        EventMeshTCPClient<EventMeshMessage> subscriber = client(EventMeshMessage.class, "sub", "java-sub");
        subscriber.registerSubBusiHandler(found -> {
            heard.add(found);
            return Optional.empty();
        });
        subscriber.subscribe("java-async", SubscriptionMode.CLUSTERING, SubscriptionType.ASYNC);
        subscriber.subscribe("java-all", SubscriptionMode.BROADCASTING, SubscriptionType.ASYNC);
        subscriber.listen();
        EventMeshTCPClient<EventMeshMessage> publisher = client(EventMeshMessage.class, "pub", "java-pub");
        Package answer = publisher.publish(message("java-async", "first"), 20000);
        say("publish", answer.getHeader().getCmd() + " " + answer.getHeader().getCode());
        EventMeshMessage first = take(heard);
        say("async", first.getTopic() + " " + first.getBody() + " " + first.getProperties().get("keys"));
        publisher.broadcast(message("java-all", "everybody"), 20000);
        say("broadcast", take(heard).getBody());
        StringBuilder large = new StringBuilder();
        for (int number = 0; number < 1024 * 1024; number++) {
            large.append((char) ('a' + number % 26));
        }
        publisher.publish(message("java-async", large.toString()), 20000);
        say("large", take(heard).getBody().contentEquals(large));

        EventMeshTCPClient<EventMeshMessage> responder = client(EventMeshMessage.class, "sub", "java-responder");
        responder.registerSubBusiHandler(found -> {
            found.setBody(found.getBody() + "!");
            return Optional.of(found);
        });
        responder.subscribe("java-sync", SubscriptionMode.CLUSTERING, SubscriptionType.SYNC);
        responder.listen();
        Package reply = publisher.rr(message("java-sync", "who"), 20000);
        say("rr", reply.getHeader().getCmd() + " " + ((String) ((Object) reply.getBody().toString())).contains("who!"));

        BlockingQueue<CloudEvent> events = new LinkedBlockingQueue<>();
        EventMeshTCPClient<CloudEvent> listener = client(CloudEvent.class, "sub", "java-ce");
        listener.registerSubBusiHandler(found -> {
            events.add(found);
            return Optional.empty();
        });
        listener.subscribe("java-ce", SubscriptionMode.CLUSTERING, SubscriptionType.ASYNC);
        listener.listen();
        EventMeshTCPClient<CloudEvent> source = client(CloudEvent.class, "pub", "java-ce-pub");
        say("ce-publish", source.publish(event("java-ce", "[1, 2]"), 20000).getHeader().getCode());
        CloudEvent came = take(events);
        say("ce", came.getId() + " " + came.getSource() + " " + came.getSubject() + " "
            + new String(came.getData().toBytes(), StandardCharsets.UTF_8));
        subscriber.unsubscribe();
        say("end", heard.size() + events.size());
    }
}
