import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.time.Instant;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import java.util.concurrent.ThreadLocalRandom;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.ProducerBuilder;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;
import org.apache.rocketmq.client.java.impl.consumer.RecordedPushConsumer;
import org.apache.rocketmq.client.java.message.MessageViewImpl;

/**
 * Clients of rocketmq-client-java that survive every failover: {@code GrpcLoad ENDPOINTS NAME}.
 *
 * <p>The same load, groups and output as tests/failover/grpc_load.py, for rocketmq-python-client.
 */
public final class GrpcLoad {
    private static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();
    private static final String NORMAL = "normal";
    private static final String DELAY = "delay";
    private static final String FIFO = "fifo";
    private static final String COMMIT = "commit";
    private static final String ROLLBACK = "rollback";
    private static final Map<String, String> TOPICS = Map.of(
        NORMAL, "Grpc-normal", DELAY, "Grpc-delay", FIFO, "Grpc-fifo", COMMIT, "Grpc-half", ROLLBACK, "Grpc-half");
    private static final String SIMPLE = "grpc-simple";
    private static final String PUSH = "grpc-push";
    private static final String ORDERED = "grpc-ordered";
    private static final Duration INVISIBLE = Duration.ofSeconds(10);
    private static final int[] DELAYS_S = {1, 2, 6};
    private static final long PAUSE_MS = 100;
    private static final long FIFO_PAUSE_MS = 300;
    private static final long AGAIN_MS = 200;
    private static final double FORGET_CHANCE = 0.05;
    private static final double CHECKER_CHANCE = 0.3;
    private static final int ENDS_MAX = 5;

    private final ClientConfiguration configuration;
    private final String name;
    private volatile boolean isDraining;

    private GrpcLoad(String endpoints, String name) {
        this.configuration = ClientConfiguration.newBuilder().setEndpoints(endpoints).enableSsl(false).build();
        this.name = name;
    }

    public static void main(String[] arguments) throws Exception {
        new GrpcLoad(arguments[0], arguments[1]).run();
        Thread.currentThread().join();
    }

    /** Starts all clients, and returns when nothing new is to be sent. */
    private void run() throws Exception {
        for (String kind : List.of(NORMAL, DELAY, FIFO)) {
            start(() -> send(kind));
        }
        start(this::sendTransactions);
        start(() -> receive(SIMPLE));
        start(() -> receive(ORDERED));
        start(this::listen);
        System.in.read();
        isDraining = true;
    }

    private interface Task {
        void run() throws Exception;
    }

    private static void start(Task task) {
        Thread thread = new Thread(() -> {
            try {
                task.run();
            } catch (Exception error) {
                error.printStackTrace();
                System.exit(1);
            }
        });
        thread.setDaemon(true);
        thread.start();
    }

    /** Writes an event, a JSON list, to standard output. */
    private static void note(Object... event) {
        String line = Stream.of(event)
            .map(value -> value instanceof String text ? "\"" + text.replace("\"", "\\\"") + "\"" : value.toString())
            .collect(Collectors.joining(", ", "[", "]"));
        synchronized (System.out) {
            System.out.println(line);
            System.out.flush();
        }
    }

    private static double seconds(Instant at) {
        return at.getEpochSecond() + at.getNano() / 1e9;
    }

    private static boolean happens(double chance) {
        return ThreadLocalRandom.current().nextDouble() < chance;
    }

    /** Whether a consumer is to leave a message alone. */
    private boolean forgets() {
        return !isDraining && happens(FORGET_CHANCE);
    }

    /** Returns the result of a call, or null if it failed. */
    private static <T> T attempt(String what, Callable<T> call) throws InterruptedException {
        try {
            return call.call();
        } catch (Exception error) {
            note("failed", what, error.getClass().getSimpleName());
            Thread.sleep(AGAIN_MS);
            return null;
        }
    }

    /** Returns a client that has started, which takes a master. */
    private static <T> T started(Callable<T> make) throws InterruptedException {
        T client = null;
        while (client == null) {
            client = attempt("startup", make);
        }
        return client;
    }

    private static String key(MessageView view) {
        return StandardCharsets.UTF_8.decode(view.getBody()).toString();
    }

    private static String handle(MessageView view) {
        return ((MessageViewImpl) view).getReceiptHandle();
    }

    /** Returns a new message; notes that it is sent. */
    private Message message(String kind, int number) {
        String key = name + "/" + kind + "/" + number;
        String group = "";
        long dueS = 0;
        MessageBuilder builder = PROVIDER.newMessageBuilder().setTopic(TOPICS.get(kind));
        builder.setBody(key.getBytes(StandardCharsets.UTF_8));
        if (kind.equals(DELAY)) {
            int delayS = DELAYS_S[ThreadLocalRandom.current().nextInt(DELAYS_S.length)];
            dueS = Instant.now().getEpochSecond() + delayS;
            builder.setDeliveryTimestamp(dueS * 1000);
        } else if (kind.equals(FIFO)) {
            group = name + "-" + number % 3;
            builder.setMessageGroup(group);
        }
        note("sent", key, kind, group, number, dueS);
        return builder.build();
    }

    private static String key(Message message) {
        return StandardCharsets.UTF_8.decode(message.getBody()).toString();
    }

    private void send(String kind) throws Exception {
        Producer producer = started(() -> producerBuilder(kind).build());
        for (int number = 0; !isDraining; number++) {
            Message message = message(kind, number);
            if (attempt("send", () -> producer.send(message)) != null) {
                note("stored", key(message));
            }
            Thread.sleep(kind.equals(FIFO) ? FIFO_PAUSE_MS : PAUSE_MS);
        }
    }

    private ProducerBuilder producerBuilder(String kind) {
        return PROVIDER.newProducerBuilder().setClientConfiguration(configuration).setTopics(TOPICS.get(kind));
    }

    private void sendTransactions() throws Exception {
        Producer producer = started(() -> producerBuilder(COMMIT).setTransactionChecker(view ->
            key(view).split("/")[1].equals(COMMIT) ? TransactionResolution.COMMIT : TransactionResolution.ROLLBACK
        ).build());
        for (int number = 0; !isDraining; number++) {
            sendTransaction(producer, happens(2.0 / 3) ? COMMIT : ROLLBACK, number);
            Thread.sleep(PAUSE_MS);
        }
        Thread.currentThread().join();  // answers checks
    }

    private void sendTransaction(Producer producer, String kind, int number) throws Exception {
        Message message = message(kind, number);
        Transaction transaction = producer.beginTransaction();
        if (attempt("half", () -> producer.send(message, transaction)) == null) {
            return;
        }
        note("stored", key(message));
        if (happens(CHECKER_CHANCE)) {
            return;
        }
        Callable<Boolean> end = () -> {
            if (kind.equals(COMMIT)) {
                transaction.commit();
            } else {
                transaction.rollback();
            }
            return true;
        };
        for (int times = 0; times < ENDS_MAX && attempt("end", end) == null; times++) {
        }
    }

    private static Map<String, FilterExpression> subscriptions(String group) {
        Collection<String> kinds = group.equals(ORDERED) ? List.of(FIFO) : List.of(NORMAL, DELAY, COMMIT);
        return kinds.stream().collect(Collectors.toMap(TOPICS::get, kind -> FilterExpression.SUB_ALL));
    }

    private void receive(String group) throws Exception {
        SimpleConsumer consumer = started(() -> PROVIDER.newSimpleConsumerBuilder()
            .setClientConfiguration(configuration).setConsumerGroup(group).setAwaitDuration(Duration.ofSeconds(5))
            .setSubscriptionExpressions(subscriptions(group)).build());
        while (true) {
            Instant asked = Instant.now();
            List<MessageView> views = attempt("receive", () -> consumer.receive(16, INVISIBLE));
            Instant given = Instant.now();
            if (views == null) {
                continue;
            }
            for (MessageView view : views) {
                note("given", group, key(view), handle(view), seconds(asked), seconds(given));
            }
            for (MessageView view : views) {
                Thread.sleep(ThreadLocalRandom.current().nextInt(20));
                if ((forgets() || !acknowledge(consumer, group, view)) && group.equals(ORDERED)) {
                    break;  // it comes again, before the later ones
                }
            }
        }
    }

    private static boolean acknowledge(SimpleConsumer consumer, String group, MessageView view) throws Exception {
        note("acknowledging", group, handle(view));
        Boolean isDone = attempt("ack", () -> {
            consumer.ack(view);
            return true;
        });
        if (isDone == null) {
            return false;
        }
        note("acknowledged", group, handle(view), seconds(Instant.now()));
        return true;
    }

    private void listen() throws Exception {
        started(() -> {
            var consumer = new RecordedPushConsumer(configuration, PUSH, subscriptions(PUSH), view -> {
                try {
                    Thread.sleep(ThreadLocalRandom.current().nextInt(20));
                } catch (InterruptedException stopped) {
                    return ConsumeResult.FAILURE;
                }
                return forgets() ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
            }, 4, new PushJournal());
            consumer.start();
            return consumer;
        });
    }

    private static final class PushJournal implements RecordedPushConsumer.Journal {
        @Override
        public void given(MessageViewImpl view, Instant asked) {
            note("given", PUSH, key(view), handle(view), seconds(asked), seconds(Instant.now()));
        }

        @Override
        public void hidden(String handle, Instant until) {
            note("hidden", PUSH, handle, seconds(until));
        }

        @Override
        public void acknowledging(String handle) {
            note("acknowledging", PUSH, handle);
        }

        @Override
        public void acknowledged(String handle) {
            note("acknowledged", PUSH, handle, seconds(Instant.now()));
        }
    }
}
