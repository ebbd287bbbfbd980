// The released Java SDK of EventMesh over HTTP: java -cp ... Http.java ADDRESS. Each line is a result.

import com.sun.net.httpserver.HttpServer;
import io.cloudevents.CloudEvent;
import io.cloudevents.core.builder.CloudEventBuilder;
import java.net.InetSocketAddress;
import java.net.URI;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.apache.eventmesh.client.http.conf.EventMeshHttpClientConfig;
import org.apache.eventmesh.client.http.consumer.EventMeshHttpConsumer;
import org.apache.eventmesh.client.http.producer.EventMeshHttpProducer;
import org.apache.eventmesh.common.EventMeshMessage;
import org.apache.eventmesh.common.exception.EventMeshException;
import org.apache.eventmesh.common.protocol.SubscriptionItem;
import org.apache.eventmesh.common.protocol.SubscriptionMode;
import org.apache.eventmesh.common.protocol.SubscriptionType;

class Http {

    static Map<String, String> form(String body) {
        Map<String, String> found = new HashMap<>();
        for (String pair : body.split("&")) {
            int at = pair.indexOf('=');
            found.put(pair.substring(0, at), URLDecoder.decode(pair.substring(at + 1), StandardCharsets.UTF_8));
        }
        return found;
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

    static EventMeshMessage message(String topic, String content) {
        return EventMeshMessage.builder().bizSeqNo("123").uniqueId("456").topic(topic).content(content).build()
            .addProp("ttl", "30000");
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
        BlockingQueue<Map<String, String>> heard = new LinkedBlockingQueue<>();
        HttpServer hook = HttpServer.create(new InetSocketAddress("127.0.0.1", 0), 0);
        hook.createContext("/", exchange -> {
            byte[] body = exchange.getRequestBody().readAllBytes();
            byte[] answer = "{\"retCode\": 1}".getBytes(StandardCharsets.UTF_8);
            exchange.sendResponseHeaders(200, answer.length);
            exchange.getResponseBody().write(answer);
            exchange.close();
            if (exchange.getRequestMethod().equals("POST")) {
                heard.add(form(new String(body, StandardCharsets.UTF_8)));
            }
        });
        hook.start();
        String url = "http://127.0.0.1:" + hook.getAddress().getPort() + "/sub";
        EventMeshHttpClientConfig config = EventMeshHttpClientConfig.builder().liteEventMeshAddr(args[0])
            .producerGroup("java-pub").consumerGroup("java-http").env("t").idc("d").ip("127.0.0.1").sys("1234").pid("77")
            .userName("u").password("p").build();
        EventMeshHttpConsumer consumer = new EventMeshHttpConsumer(config);
        List<SubscriptionItem> topics = Collections.singletonList(
            new SubscriptionItem("java-http", SubscriptionMode.CLUSTERING, SubscriptionType.ASYNC));
        consumer.heartBeat(topics, url);
        consumer.subscribe(topics, url);
        EventMeshHttpProducer producer = new EventMeshHttpProducer(config);
        producer.publish(message("java-http", "first & second"));
        Map<String, String> first = take(heard);
        say("push", first.get("topic") + " " + first.get("content") + " " + first.get("bizseqno") + " "
            + first.get("uniqueId"));
        CloudEvent event = CloudEventBuilder.v1().withId("id").withSource(URI.create("/test")).withType("t")
            .withSubject("java-http").withDataContentType("application/cloudevents+json")
            .withData("{\"a\":1}".getBytes(StandardCharsets.UTF_8)).withExtension("ttl", "30000").build();
        producer.publish(event);
        String content = take(heard).get("content");
        say("ce", content.contains("\"protocoltype\":\"cloudevents\"") + " " + content.contains("\"data\":{\"a\":1}"));
        try {
            say("rr", producer.request(message(args[1], "who"), 20000).getContent());
        } catch (EventMeshException error) {  // release 1.10 cannot read the reply of any server: it has no constructor
            boolean ours = error.getCause().getCause().getMessage().contains("who over TCP");
            say("rr", ours ? "a reply that the SDK cannot read" : error.toString());
        }
        consumer.unsubscribe(Collections.singletonList("java-http"), url);
        say("end", heard.size());
    }
}
