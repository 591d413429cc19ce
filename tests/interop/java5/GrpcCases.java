import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.Callable;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.function.BooleanSupplier;
import java.util.function.Predicate;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.SendReceipt;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionChecker;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/**
 * Cases of rocketmq-client-java against a gRPC port: {@code GrpcCases ENDPOINT PREFIX}.
 *
 * <p>Runs all cases at the same time, each with the topic PREFIX-NAME and the group PREFIX-NAME-g, and prints "ok NAME"
 * or "FAIL NAME reason". The cases, and the types of their topics, are those of grpc_cases.py.
 */
public final class GrpcCases {
    private static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();
    private static final Duration INVISIBLE = Duration.ofSeconds(30);
    private static final int BODY_BYTES_MAX = 4 * 1024 * 1024;
    private static final Map<String, Scenario> CASES = new LinkedHashMap<>();

    static {
        CASES.put("send and receive", GrpcCases::sendAndReceive);
        CASES.put("push consumer", GrpcCases::pushConsumer);
        CASES.put("without waiting", GrpcCases::withoutWaiting);
        CASES.put("4 MiB bodies", GrpcCases::largeBodies);
        CASES.put("tags", GrpcCases::tags);
        CASES.put("SQL92", GrpcCases::sql92);
        CASES.put("message groups, push", GrpcCases::groupsPush);
        CASES.put("message groups, simple", GrpcCases::groupsSimple);
        CASES.put("delay", GrpcCases::delay);
        CASES.put("recall", GrpcCases::recall);
        CASES.put("commit", test -> endTransaction(test, true));
        CASES.put("rollback", test -> endTransaction(test, false));
        CASES.put("check of a transaction", GrpcCases::checkTransactions);
        CASES.put("redelivery", GrpcCases::redelivery);
        CASES.put("invisible time", GrpcCases::invisibleTime);
        CASES.put("renewal", GrpcCases::renewal);
        CASES.put("retries", GrpcCases::retries);
        CASES.put("dead letters", test -> deadLetters(test, false));
        CASES.put("message groups, dead letters", test -> deadLetters(test, true));
        CASES.put("priority", GrpcCases::priority);
        CASES.put("unknown topic", GrpcCases::unknownTopic);
        CASES.put("wrong type", GrpcCases::wrongType);
    }

    private interface Scenario {
        void run(Case test) throws Exception;
    }

    /** One case with its names and clients. */
    private record Case(String topic, String group, String reader, ClientConfiguration configuration) {
        static Case of(String name, String endpoint, String prefix) {
            String topic = prefix + "-" + name.replace(" ", "-").replace(",", "");
            ClientConfiguration configuration = ClientConfiguration.newBuilder()
                .setEndpoints(endpoint).enableSsl(false).setRequestTimeout(Duration.ofSeconds(10)).build();
            return new Case(topic, topic + "-g", topic + "-reader", configuration);
        }

        Producer producer() throws Exception {
            return producer(null);
        }

        Producer producer(TransactionChecker checker) throws Exception {
            var builder = PROVIDER.newProducerBuilder().setClientConfiguration(configuration).setTopics(topic);
            return (checker == null ? builder : builder.setTransactionChecker(checker)).build();
        }

        SimpleConsumer simple() throws Exception {
            return simple(FilterExpression.SUB_ALL);
        }

        /** A SimpleConsumer whose group has its offsets. */
        SimpleConsumer simple(FilterExpression expression) throws Exception {
            SimpleConsumer consumer = consumer(group, topic, expression);
            consumer.receive(1, Duration.ofSeconds(10));
            return consumer;
        }

        SimpleConsumer consumer(String name, String from, FilterExpression expression) throws Exception {
            return PROVIDER.newSimpleConsumerBuilder().setClientConfiguration(configuration).setConsumerGroup(name)
                .setAwaitDuration(Duration.ofSeconds(5)).setSubscriptionExpressions(Map.of(from, expression)).build();
        }

        void push(Predicate<MessageView> listener) throws Exception {
            PROVIDER.newPushConsumerBuilder().setClientConfiguration(configuration).setConsumerGroup(group)
                .setSubscriptionExpressions(Map.of(topic, FilterExpression.SUB_ALL))
                .setMessageListener(view -> listener.test(view) ? ConsumeResult.SUCCESS : ConsumeResult.FAILURE)
                .build();
        }

        MessageBuilder message(Object body) {
            return message(body.toString().getBytes(StandardCharsets.UTF_8));
        }

        MessageBuilder message(byte[] body) {
            return PROVIDER.newMessageBuilder().setTopic(topic).setBody(body);
        }
    }

    private static byte[] bytes(MessageView view) {
        byte[] bytes = new byte[view.getBody().remaining()];
        view.getBody().get(bytes);
        return bytes;
    }

    private static String body(MessageView view) {
        return new String(bytes(view), StandardCharsets.UTF_8);
    }

    private static List<String> bodies(Collection<MessageView> views) {
        return views.stream().map(GrpcCases::body).sorted().toList();
    }

    private static void equal(Object found, Object expected) {
        if (!expected.equals(found)) {
            throw new AssertionError("found " + found + ", expected " + expected);
        }
    }

    private static void fails(Callable<?> call) {
        try {
            call.call();
        } catch (Exception expected) {
            return;
        }
        throw new AssertionError("no exception");
    }

    /** Receives and acknowledges until there are `count` messages. */
    private static List<MessageView> take(SimpleConsumer consumer, int count, int withinS) throws Exception {
        List<MessageView> found = takeUnacknowledged(consumer, count, withinS, INVISIBLE);
        for (MessageView view : found) {
            consumer.ack(view);
        }
        return found;
    }

    private static List<MessageView> takeUnacknowledged(
        SimpleConsumer consumer, int count, int withinS, Duration invisible
    ) throws Exception {
        List<MessageView> found = new ArrayList<>();
        long ends = System.nanoTime() + withinS * 1_000_000_000L;
        while (found.size() < count && System.nanoTime() < ends) {
            found.addAll(consumer.receive(16, invisible));
        }
        return found;
    }

    /** Waits for a condition. */
    private static void until(int withinS, BooleanSupplier condition, Object found) throws Exception {
        long ends = System.nanoTime() + withinS * 1_000_000_000L;
        while (!condition.getAsBoolean()) {
            if (System.nanoTime() > ends) {
                throw new AssertionError("within " + withinS + " s only " + found);
            }
            Thread.sleep(50);
        }
    }

    private static void sendAndReceive(Case test) throws Exception {
        SimpleConsumer consumer = test.simple();
        Producer producer = test.producer();
        Map<String, String> sent = new LinkedHashMap<>();
        for (int number = 0; number < 30; number++) {
            MessageBuilder message = test.message(number).setTag("T").setKeys("k" + number);
            SendReceipt receipt = producer.send(message.addProperty("number", "" + number).build());
            sent.put(receipt.getMessageId().toString(), "" + number);
        }
        Map<String, String> received = new LinkedHashMap<>();
        for (MessageView view : take(consumer, 30, 30)) {
            equal(received.put(view.getMessageId().toString(), body(view)) == null, true);
            equal(view.getTag().orElse(""), "T");
            equal(view.getDeliveryAttempt(), 1);
            equal(view.getTopic(), test.topic);
            equal(List.copyOf(view.getKeys()), List.of("k" + body(view)));
            equal(view.getProperties().get("number"), body(view));
        }
        equal(received, sent);
    }

    private static void pushConsumer(Case test) throws Exception {
        List<String> found = new CopyOnWriteArrayList<>();
        test.push(view -> found.add(view.getMessageId().toString()));
        Producer producer = test.producer();
        Set<String> sent = new HashSet<>();
        for (int number = 0; number < 100; number++) {
            sent.add(producer.send(test.message(number).build()).getMessageId().toString());
        }
        until(30, () -> found.size() >= 100, found);
        equal(Set.copyOf(found), sent);
        equal(found.size(), 100);
    }

    private static void withoutWaiting(Case test) throws Exception {
        SimpleConsumer consumer = test.simple();
        Producer producer = test.producer();
        List<CompletableFuture<SendReceipt>> receipts = IntStream.range(0, 200)
            .mapToObj(number -> producer.sendAsync(test.message(number).build())).toList();
        equal(receipts.stream().map(receipt -> receipt.join().getMessageId().toString()).distinct().count(), 200L);
        equal(Set.copyOf(bodies(take(consumer, 200, 40))),
            IntStream.range(0, 200).mapToObj(Integer::toString).collect(Collectors.toSet()));
    }

    private static void largeBodies(Case test) throws Exception {
        SimpleConsumer consumer = test.simple();
        Producer producer = test.producer();
        List<Integer> sizes = List.of(3 * 1024 * 1024, BODY_BYTES_MAX - 4096);
        for (int size : sizes) {
            producer.send(test.message(new byte[size]).build());
        }
        equal(take(consumer, 2, 30).stream().map(view -> view.getBody().remaining()).sorted().toList(), sizes);
        fails(() -> producer.send(test.message(new byte[BODY_BYTES_MAX + 1]).build()));
    }

    private static void tags(Case test) throws Exception {
        SimpleConsumer consumer = test.simple(new FilterExpression("A || C"));
        Producer producer = test.producer();
        for (String tag : "ABCABC".split("")) {
            producer.send(test.message(tag).setTag(tag).build());
        }
        equal(bodies(take(consumer, 5, 12)), List.of("A", "A", "C", "C"));
    }

    private static void sql92(Case test) throws Exception {
        String condition = "price > 10 AND region IN ('eu', 'us')";
        SimpleConsumer consumer = test.simple(new FilterExpression(condition, FilterExpressionType.SQL92));
        Producer producer = test.producer();
        for (String[] pair : new String[][] {{"5", "eu"}, {"15", "eu"}, {"16", "asia"}, {"20", "us"}}) {
            MessageBuilder message = test.message(pair[0]).addProperty("price", pair[0]);
            producer.send(message.addProperty("region", pair[1]).build());
        }
        equal(bodies(take(consumer, 3, 12)), List.of("15", "20"));
    }

    private static void groupsPush(Case test) throws Exception {
        Map<String, List<String>> found = new ConcurrentHashMap<>();
        List<String> failed = new CopyOnWriteArrayList<>();
        test.push(view -> {
            String group = view.getMessageGroup().orElse("");
            if (group.equals("g0") && body(view).equals("5")) {
                failed.add("5");
                if (failed.size() == 1) {
                    return false;
                }
            }
            return found.computeIfAbsent(group, name -> new CopyOnWriteArrayList<>()).add(body(view));
        });
        Producer producer = test.producer();
        List<String> groups = List.of("g0", "g1", "g2");
        for (int number = 0; number < 15; number++) {
            for (String group : groups) {
                producer.send(test.message(number).setMessageGroup(group).build());
            }
        }
        until(40, () -> found.values().stream().mapToInt(List::size).sum() >= 45, found);
        List<String> ordered = IntStream.range(0, 15).mapToObj(Integer::toString).toList();
        equal(found, groups.stream().collect(Collectors.toMap(group -> group, group -> ordered)));
        equal(failed.size(), 2);
    }

    private static void groupsSimple(Case test) throws Exception {
        SimpleConsumer consumer = test.simple();
        Producer producer = test.producer();
        for (int number = 0; number < 4; number++) {
            producer.send(test.message(number).setMessageGroup("one").build());
        }
        List<MessageView> first = new ArrayList<>();
        for (int attempt = 0; attempt < 2 && first.isEmpty(); attempt++) {
            first = consumer.receive(2, INVISIBLE);
        }
        // A message is readable soon after its send, not at once: the first pop may come between the first two.
        int taken = first.size();
        equal(taken == 1 || taken == 2, true);
        List<String> sent = List.of("0", "1", "2", "3");
        equal(first.stream().map(GrpcCases::body).toList(), sent.subList(0, taken));
        equal(consumer.receive(16, INVISIBLE).size(), 0);
        for (MessageView view : first) {
            consumer.ack(view);
        }
        equal(take(consumer, 4 - taken, 20).stream().map(GrpcCases::body).toList(), sent.subList(taken, 4));
    }

    private static void delay(Case test) throws Exception {
        SimpleConsumer consumer = test.simple();
        Producer producer = test.producer();
        long nowMs = System.currentTimeMillis() / 1000 * 1000;
        for (int delayMs : new int[] {2000, 5000}) {
            long deliverAtMs = nowMs + delayMs;
            producer.send(test.message(deliverAtMs).setDeliveryTimestamp(deliverAtMs).build());
        }
        for (int number = 0; number < 2; number++) {
            MessageView view = take(consumer, 1, 15).get(0);
            long deliverAtMs = Long.parseLong(body(view));
            long lateMs = System.currentTimeMillis() - deliverAtMs;
            equal(view.getDeliveryTimestamp().orElse(0L), deliverAtMs);
            equal(lateMs >= 0 && lateMs < 3500 ? "on time" : "late by ms: " + lateMs, "on time");
        }
    }

    private static void recall(Case test) throws Exception {
        SimpleConsumer consumer = test.simple();
        Producer producer = test.producer();
        long deliverAtMs = System.currentTimeMillis() + 5000;
        SendReceipt recalled = producer.send(test.message("recalled").setDeliveryTimestamp(deliverAtMs).build());
        producer.send(test.message("kept").setDeliveryTimestamp(deliverAtMs).build());
        equal(producer.recallMessage(test.topic, recalled.getRecallHandle()).getMessageId(), recalled.getMessageId());
        equal(bodies(take(consumer, 2, 12)), List.of("kept"));
        fails(() -> producer.recallMessage(test.topic, "bad"));
    }

    /** Decides by the body, "commit" or "roll back", if at all, and notes what it was asked about. */
    private static TransactionChecker checker(Set<String> asked) {
        return view -> {
            asked.add(body(view));
            return switch (body(view)) {
                case "commit" -> TransactionResolution.COMMIT;
                case "roll back" -> TransactionResolution.ROLLBACK;
                default -> TransactionResolution.UNKNOWN;
            };
        };
    }

    private static void endTransaction(Case test, boolean commits) throws Exception {
        SimpleConsumer consumer = test.simple();
        Producer producer = test.producer(checker(ConcurrentHashMap.newKeySet()));
        Transaction transaction = producer.beginTransaction();
        producer.send(test.message("half").build(), transaction);
        equal(consumer.receive(16, Duration.ofSeconds(10)).size(), 0);
        if (commits) {
            transaction.commit();
        } else {
            transaction.rollback();
        }
        equal(take(consumer, 1, 10).size(), commits ? 1 : 0);
    }

    private static void checkTransactions(Case test) throws Exception {
        Set<String> asked = ConcurrentHashMap.newKeySet();
        SimpleConsumer consumer = test.simple();
        Producer producer = test.producer(checker(asked));
        for (String body : List.of("commit", "roll back")) {
            producer.send(test.message(body).build(), producer.beginTransaction());
        }
        equal(bodies(take(consumer, 1, 40)), List.of("commit"));
        until(20, () -> asked.size() == 2, asked);
    }

    private static void redelivery(Case test) throws Exception {
        SimpleConsumer consumer = test.simple();
        Producer producer = test.producer();
        long sentNs = System.nanoTime();
        producer.send(test.message("body").build());
        MessageView first = takeUnacknowledged(consumer, 1, 10, Duration.ofSeconds(10)).get(0);
        MessageView second = take(consumer, 1, 30).get(0);
        long afterS = (System.nanoTime() - sentNs) / 1_000_000_000L;
        equal(second.getMessageId(), first.getMessageId());
        equal(second.getDeliveryAttempt(), 2);
        equal(second.getTopic(), test.topic);
        equal(afterS >= 10 && afterS < 25 ? "in time" : "after s: " + afterS, "in time");
    }

    private static void invisibleTime(Case test) throws Exception {
        SimpleConsumer consumer = test.simple();
        test.producer().send(test.message("body").build());
        MessageView first = takeUnacknowledged(consumer, 1, 10, Duration.ofSeconds(60)).get(0);
        consumer.changeInvisibleDuration(first, Duration.ofSeconds(2));
        equal(take(consumer, 1, 20).size(), 1);
    }

    /** The client keeps the new handle in the message. */
    private static void renewal(Case test) throws Exception {
        SimpleConsumer consumer = test.simple();
        test.producer().send(test.message("body").build());
        MessageView first = takeUnacknowledged(consumer, 1, 10, Duration.ofSeconds(10)).get(0);
        consumer.changeInvisibleDuration(first, Duration.ofSeconds(25));
        equal(takeUnacknowledged(consumer, 1, 13, INVISIBLE).size(), 0);
        consumer.ack(first);
        equal(takeUnacknowledged(consumer, 1, 16, INVISIBLE).size(), 0);
    }

    private static void retries(Case test) throws Exception {
        List<Integer> attempts = new CopyOnWriteArrayList<>();
        test.push(view -> attempts.add(view.getDeliveryAttempt()) && attempts.size() >= 3);
        test.producer().send(test.message("body").build());
        until(40, () -> attempts.size() >= 3, attempts);
        Thread.sleep(3000);
        equal(attempts, List.of(1, 2, 3));
    }

    private static void deadLetters(Case test, boolean isFifo) throws Exception {
        List<Integer> attempts = new CopyOnWriteArrayList<>();
        List<String> others = new CopyOnWriteArrayList<>();
        test.push(view -> body(view).equals("bad") ? !attempts.add(view.getDeliveryAttempt()) : others.add(body(view)));
        Producer producer = test.producer();
        for (String body : List.of("bad", "good")) {
            MessageBuilder message = test.message(body);
            producer.send((isFifo ? message.setMessageGroup("one") : message).build());
        }
        until(60, () -> attempts.size() >= 2 && others.equals(List.of("good")), List.of(attempts, others));
        List<MessageView> dead = new ArrayList<>();
        long ends = System.nanoTime() + 40_000_000_000L;
        while (dead.isEmpty() && System.nanoTime() < ends) {
            Thread.sleep(1000);
            String topic = "%DLQ%" + test.group;
            try (SimpleConsumer consumer = test.consumer(test.reader, topic, FilterExpression.SUB_ALL)) {
                dead = take(consumer, 1, 10);
            } catch (Exception error) { // no such topic yet
                System.err.println("waiting: " + error);
            }
        }
        equal(bodies(dead), List.of("bad"));
        equal(attempts, List.of(1, 2));
    }

    private static void priority(Case test) throws Exception {
        SimpleConsumer consumer = test.simple();
        Producer producer = test.producer();
        for (int number = 0; number < 4; number++) {
            producer.send(test.message(number).setPriority(number).build());
        }
        List<MessageView> found = take(consumer, 4, 20);
        equal(bodies(found), List.of("0", "1", "2", "3"));
        for (MessageView view : found) {
            equal(view.getPriority().map(String::valueOf).orElse("none"), body(view));
        }
    }

    private static void unknownTopic(Case test) {
        Case unknown = new Case(test.topic + "-no", test.group, test.reader, test.configuration);
        fails(() -> unknown.producer().send(unknown.message("body").build()));
    }

    private static void wrongType(Case test) throws Exception {
        Producer producer = test.producer();
        fails(() -> producer.send(test.message("body").setMessageGroup("g").build()));
        long deliverAtMs = System.currentTimeMillis() + 10_000;
        fails(() -> producer.send(test.message("body").setDeliveryTimestamp(deliverAtMs).build()));
    }

    private static void run(String name, String endpoint, String prefix) {
        long beganNs = System.nanoTime();
        String result;
        try {
            CASES.get(name).run(Case.of(name, endpoint, prefix));
            result = "ok " + name;
        } catch (Exception | AssertionError error) {
            error.printStackTrace();
            result = "FAIL " + name + " " + error.toString().replace("\n", " ");
        }
        System.out.println(result);
        System.err.println(name + ": " + (System.nanoTime() - beganNs) / 1_000_000L + " ms");
    }

    /** Runs the cases, and ends the process without waiting for the client's threads. */
    public static void main(String[] arguments) throws Exception {
        List<Thread> threads = new ArrayList<>();
        for (String name : CASES.keySet()) {
            threads.add(new Thread(() -> run(name, arguments[0], arguments[1])));
        }
        threads.forEach(Thread::start);
        for (Thread thread : threads) {
            thread.join();
        }
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }
}
