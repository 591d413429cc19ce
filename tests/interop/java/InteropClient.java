// The real RocketMQ Java client, driven line by line over stdin by tests/interop/java_client.py.
//
// A command is one line `ID NAME key=value ...` (values without spaces); each runs in its own thread and answers with JSON
// lines {"id":ID,"event":...}: any number of events, then one "done" or "failed". The end of stdin ends the process.
//   produce  nameServer topic count [first] [batch] [threads] [queues] [timeoutMs] [limitS] [pauseMs] [until=FILE] acks=FILE
//            sends messages first..first+count-1, each again and again until the broker has stored it; one line an
//            acknowledged message goes to FILE: status sequence physicalOffset queueId queueOffset size crc storeHost msgId
//            ("progress" about every thousand messages). Each thread pauses after a send, and stops when `until` exists
//   send     nameServer topic count [first] [size] [queues] [timeoutMs] [mode=sync|async] [wait=true|false] [compress]
//            [delay=LEVEL]   one try each, one "sent" event each with status or error
//   consume  nameServer topic out=FILE [brokerId] [queue] [group]    pulls every queue from its start to its end; a line a message:
//            queueId queueOffset physicalOffset sequence size crc msgId tags keys
//   push     nameServer topic group count [limitS] [popInvisibleMs]   push consumer, which pops with that option; "started", then a
//            "got" event a message
//   fail     nameServer topic group count [times] [limitS]   push consumer that fails every message; see FailingConsumer.java
//   sign     accessKey secretKey [securityToken] code fields=BASE64 [body=BASE64]    the signature that AclClientRPCHook puts into a
//            request with these ext fields (one "name TAB value" a line)
//   select, request                                          see Asking.java
// Commands that talk to a server take accessKey and secretKey, too, and sign then.
//   offsets  nameServer topic group [commit=QUEUE:OFFSET]    min, max and committed consumer offset of every queue
// Families.java has further commands.
// A body starts with its sequence number as ten decimal digits; crc is CRC-32 of the body & 0x7FFFFFFF, as a record holds it.
import java.io.*;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.*;
import java.util.zip.CRC32;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.consumer.*;
import org.apache.rocketmq.client.consumer.listener.*;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.consumer.store.ReadOffsetType;
import org.apache.rocketmq.client.producer.*;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.*;
import org.apache.rocketmq.remoting.RPCHook;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;

@SuppressWarnings("deprecation")
public class InteropClient {
    static final int SIZE_MIN = 10, SIZE_MAX = 20 * 1024;
    static final byte[] NOISE = new byte[1 << 20];
    static final AtomicInteger INSTANCE = new AtomicInteger();

    static { new Random(20).nextBytes(NOISE); }

    final String id;
    final Map<String, String> options = new HashMap<>();

    InteropClient(String[] words) {
        id = words[0];
        for (int i = 2; i < words.length; i++) {
            int equals = words[i].indexOf('=');
            options.put(words[i].substring(0, equals), words[i].substring(equals + 1));
        }
    }

    String text(String key) {
        String value = options.get(key);
        if (value == null) throw new IllegalArgumentException(key + " is missing");
        return value;
    }

    int number(String key, int otherwise) {
        return options.containsKey(key) ? Integer.parseInt(options.get(key)) : otherwise;
    }

    public static void main(String[] args) throws Exception {
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line; (line = commands.readLine()) != null; ) {
            String[] words = line.trim().split(" +");
            InteropClient command = new InteropClient(words);
            new Thread(() -> command.run(words[1]), "command-" + words[0]).start();
        }
        Runtime.getRuntime().halt(0);
    }

    void run(String name) {
        try {
            switch (name) {
                case "produce": produce(); break;
                case "send": send(); break;
                case "consume": consume(); break;
                case "push": push(); break;
                case "fail": FailingConsumer.run(this); break;
                case "transact": TransactionProducer.run(this); break;
                case "offsets": offsets(); break;
                case "sign": sign(); break;
                case "select": Asking.select(this); break;
                case "request": Asking.request(this); break;
                default: Families.run(name, this);
            }
        } catch (Throwable e) {
            StringWriter trace = new StringWriter();
            e.printStackTrace(new PrintWriter(trace));
            emit("failed", "error", trace.toString());
        }
    }

    // ---- events ----------------------------------------------------------------------------------------------------
    void emit(String event, Object... pairs) {
        StringBuilder line = new StringBuilder("{\"id\":").append(quote(id)).append(",\"event\":").append(quote(event));
        for (int i = 0; i < pairs.length; i += 2) {
            line.append(',').append(quote(pairs[i].toString())).append(':');
            Object value = pairs[i + 1];
            line.append(value instanceof Number ? value.toString() : value == null ? "null" : quote(value.toString()));
        }
        synchronized (System.out) {
            System.out.println(line.append('}'));
            System.out.flush();
        }
    }

    static String quote(String text) {
        StringBuilder quoted = new StringBuilder("\"");
        for (char c : text.toCharArray()) {
            if (c == '"' || c == '\\') quoted.append('\\').append(c);
            else if (c < 32 || c > 126) quoted.append(String.format("\\u%04x", (int) c));
            else quoted.append(c);
        }
        return quoted.append('"').toString();
    }

    // ---- messages --------------------------------------------------------------------------------------------------
    /** Mostly small: half of the bodies have 10 bytes, one in twenty-four is over 10 KiB, the mean is about 1.2 KiB. */
    static int mixedSize(long sequence) {
        double u = new SplittableRandom(sequence * 0x9E3779B97F4A7C15L + 1).nextDouble();
        return SIZE_MIN + (int) ((SIZE_MAX - SIZE_MIN + 1) * Math.pow(u, 16));
    }

    static byte[] body(long sequence, int size) {
        byte[] body = new byte[Math.max(size, SIZE_MIN)];
        int from = (int) ((sequence * 7919) % (NOISE.length / 2));
        for (int at = 0; at < body.length; at += NOISE.length / 2)
            System.arraycopy(NOISE, from, body, at, Math.min(NOISE.length / 2, body.length - at));
        System.arraycopy(String.format("%010d", sequence).getBytes(StandardCharsets.US_ASCII), 0, body, 0, 10);
        return body;
    }

    static int crc(byte[] body) {
        CRC32 crc = new CRC32();
        crc.update(body);
        return (int) (crc.getValue() & 0x7FFFFFFF);
    }

    static long sequenceOf(byte[] body) { return Long.parseLong(new String(body, 0, 10, StandardCharsets.US_ASCII)); }

    static Message message(String topic, long sequence, int size) {
        Message message = new Message(topic, body(sequence, size));
        if (sequence % 4 != 3) message.setTags("Tag" + (char) ('A' + sequence % 4));
        if (sequence % 5 == 0) message.setKeys("key-" + sequence);
        if (sequence % 50 == 0) message.setKeys(Arrays.asList("key-" + sequence, "group-" + sequence % 1000));
        return message;
    }

    DefaultMQProducer producer(boolean compress) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("interop_producer_" + INSTANCE.incrementAndGet(), hook());
        producer.setNamesrvAddr(text("nameServer"));
        producer.setInstanceName("p" + System.nanoTime());
        producer.setVipChannelEnabled(false);
        producer.setSendMsgTimeout(number("timeoutMs", 10_000));
        producer.setRetryTimesWhenSendFailed(0);
        producer.setRetryTimesWhenSendAsyncFailed(0);
        producer.setRetryAnotherBrokerWhenNotStoreOK(false);
        producer.setDefaultTopicQueueNums(number("queues", 4));
        producer.setPollNameServerInterval(1000);
        if (!compress) producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        producer.start();
        return producer;
    }

    // ---- credentials -------------------------------------------------------------------------------------------------
    RPCHook hook() {
        if (!options.containsKey("accessKey")) return null;
        String token = options.get("securityToken");
        return new AclClientRPCHook(token == null ? new SessionCredentials(text("accessKey"), text("secretKey"))
            : new SessionCredentials(text("accessKey"), text("secretKey"), token));
    }

    void sign() {
        RemotingCommand request = RemotingCommand.createRequestCommand(number("code", 310), null);
        String fields = new String(Base64.getDecoder().decode(text("fields")), StandardCharsets.UTF_8);
        for (String line : fields.split("\n")) {
            String[] pair = line.split("\t", 2);
            if (pair.length == 2) request.addExtField(pair[0], pair[1]);
        }
        if (options.containsKey("body")) request.setBody(Base64.getDecoder().decode(options.get("body")));
        hook().doBeforeRequest("127.0.0.1:1", request);
        emit("signed", "signature", request.getExtFields().get("Signature"));
        emit("done");
    }

    // ---- produce ---------------------------------------------------------------------------------------------------
    void produce() throws Exception {
        String topic = text("topic");
        long count = number("count", 0), first = number("first", 0);
        int batch = number("batch", 1), threads = number("threads", 1);
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(number("limitS", 300));
        int pauseMs = number("pauseMs", 0);
        File until = options.containsKey("until") ? new File(text("until")) : null;
        DefaultMQProducer producer = producer(false);
        AtomicLong next = new AtomicLong(first), acked = new AtomicLong(), reported = new AtomicLong();
        AtomicLong errors = new AtomicLong(), bytes = new AtomicLong();
        ConcurrentHashMap<String, LongAdder> statuses = new ConcurrentHashMap<>();
        AtomicReference<String> lastError = new AtomicReference<>("");
        List<Thread> workers = new ArrayList<>();
        try (PrintWriter acks = new PrintWriter(new BufferedWriter(new FileWriter(text("acks")), 1 << 20))) {
            for (int t = 0; t < threads; t++) {
                Thread worker = new Thread(() -> {
                    while (System.nanoTime() < deadline && (until == null || !until.exists())) {
                        long from = next.getAndAdd(batch), to = Math.min(from + batch, first + count);
                        if (from >= to) return;
                        SendResult result = null;
                        while (result == null && System.nanoTime() < deadline) {
                            List<Message> messages = new ArrayList<>();       // anew: a failed send leaves its mark on the old ones
                            for (long s = from; s < to; s++) messages.add(message(topic, s, mixedSize(s)));
                            try {
                                result = messages.size() == 1 ? producer.send(messages.get(0)) : producer.send(messages);
                                record(acks, messages, from, result, bytes);
                            } catch (Exception e) {
                                errors.incrementAndGet();
                                lastError.set(brief(e));
                                try { Thread.sleep(100); } catch (InterruptedException i) { return; }
                            }
                        }
                        if (result == null) return;
                        statuses.computeIfAbsent(result.getSendStatus().name(), k -> new LongAdder()).add(to - from);
                        long done = acked.addAndGet(to - from), last = reported.get();
                        if (done >= last + 1000 && reported.compareAndSet(last, done)) emit("progress", "acked", done);
                        if (pauseMs > 0) {
                            try { Thread.sleep(pauseMs); } catch (InterruptedException i) { return; }
                        }
                    }
                });
                worker.start();
                workers.add(worker);
            }
            for (Thread worker : workers) worker.join();
        }
        producer.shutdown();
        List<Object> summary = new ArrayList<>(Arrays.asList("acked", acked.get(), "errors", errors.get(), "bytes", bytes.get(), "lastError", lastError.get()));
        statuses.forEach((status, n) -> { summary.add(status); summary.add(n.sum()); });
        emit("done", summary.toArray());
    }

    static void record(PrintWriter acks, List<Message> messages, long from, SendResult result, AtomicLong bytes) throws Exception {
        String[] offsetIds = result.getOffsetMsgId().split(","), ids = result.getMsgId().split(",");
        if (offsetIds.length != messages.size() || ids.length != messages.size())
            throw new IllegalStateException(messages.size() + " messages, ids " + result);
        StringBuilder lines = new StringBuilder();
        for (int i = 0; i < offsetIds.length; i++) {
            MessageId id = MessageDecoder.decodeMessageId(offsetIds[i]);
            byte[] body = messages.get(i).getBody();
            bytes.addAndGet(body.length);
            lines.append(result.getSendStatus()).append(' ').append(from + i).append(' ').append(id.getOffset()).append(' ')
                .append(result.getMessageQueue().getQueueId()).append(' ').append(result.getQueueOffset() + i).append(' ')
                .append(body.length).append(' ').append(crc(body)).append(' ').append(host(id)).append(' ').append(ids[i]).append('\n');
        }
        synchronized (acks) { acks.print(lines); }
    }

    static String host(MessageId id) {
        java.net.InetSocketAddress address = (java.net.InetSocketAddress) id.getAddress();
        return address.getAddress().getHostAddress() + ":" + address.getPort();
    }

    static String brief(Throwable e) {
        String own = e.getClass().getSimpleName() + ": " + String.valueOf(e.getMessage()).split("\n")[0];
        return e.getCause() == null ? own : own + " <- " + brief(e.getCause());
    }

    // ---- send ------------------------------------------------------------------------------------------------------
    void send() throws Exception {
        String topic = text("topic");
        int count = number("count", 1), first = number("first", 0), size = number("size", 100);
        boolean async = "async".equals(options.get("mode"));
        DefaultMQProducer producer = producer(Boolean.parseBoolean(options.get("compress")));
        CountDownLatch answered = new CountDownLatch(count);
        for (int i = 0; i < count; i++) {
            long sequence = first + i, start = System.nanoTime();
            Message message = message(topic, sequence, size);
            byte[] body = message.getBody();
            if ("false".equals(options.get("wait"))) message.setWaitStoreMsgOK(false);
            if (options.containsKey("delay")) message.setDelayTimeLevel(number("delay", 0));
            SendCallback report = new SendCallback() {
                public void onSuccess(SendResult result) {
                    try {
                        MessageId decoded = MessageDecoder.decodeMessageId(result.getOffsetMsgId());
                        emit("sent", "sequence", sequence, "status", result.getSendStatus(), "ms", (System.nanoTime() - start) / 1_000_000,
                            "msgId", result.getMsgId(), "uniqueKey", message.getProperty("UNIQ_KEY"), "offsetMsgId", result.getOffsetMsgId(),
                            "storeHost", host(decoded), "physicalOffset", decoded.getOffset(), "queueId", result.getMessageQueue().getQueueId(),
                            "queueOffset", result.getQueueOffset(), "size", body.length, "crc", crc(body));
                    } catch (Throwable e) { onException(e); return; }
                    answered.countDown();
                }

                public void onException(Throwable e) {
                    emit("sent", "sequence", sequence, "status", "ERROR", "ms", (System.nanoTime() - start) / 1_000_000, "error", brief(e));
                    answered.countDown();
                }
            };
            if (async) {
                producer.send(message, report);
            } else {
                SendResult result = null;
                try { result = producer.send(message); } catch (Exception e) { report.onException(e); }
                if (result != null) report.onSuccess(result);
            }
        }
        boolean all = answered.await(60, TimeUnit.SECONDS);
        producer.shutdown();
        emit("done", "answered", all ? count : count - answered.getCount());
    }

    // ---- consume ---------------------------------------------------------------------------------------------------
    DefaultMQPullConsumer puller(String group) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer(group, hook());
        consumer.setNamesrvAddr(text("nameServer"));
        consumer.setInstanceName("c" + System.nanoTime());
        consumer.setVipChannelEnabled(false);
        consumer.start();
        return consumer;
    }

    void consume() throws Exception {
        String topic = text("topic");
        DefaultMQPullConsumer consumer = puller(options.getOrDefault("group", "interop_puller_" + INSTANCE.incrementAndGet()));
        if (options.containsKey("brokerId")) {
            consumer.getDefaultMQPullConsumerImpl().getPullAPIWrapper().setDefaultBrokerId(number("brokerId", 0));
            consumer.getDefaultMQPullConsumerImpl().getPullAPIWrapper().setConnectBrokerByUser(true);
        }
        List<MessageQueue> queues = new ArrayList<>(consumer.fetchSubscribeMessageQueues(topic));
        queues.removeIf(queue -> options.containsKey("queue") && queue.getQueueId() != number("queue", 0));
        Collections.sort(queues);
        long count = 0, bytes = 0;
        try (PrintWriter out = new PrintWriter(new BufferedWriter(new FileWriter(text("out")), 1 << 20))) {
            for (MessageQueue queue : queues) {
                long position = 0;
                for (int empty = 0; empty < 3; ) {
                    PullResult result = consumer.pull(queue, "*", position, 32);
                    if (result.getPullStatus() == PullStatus.FOUND) {
                        for (MessageExt m : result.getMsgFoundList()) {
                            out.println(m.getQueueId() + " " + m.getQueueOffset() + " " + m.getCommitLogOffset() + " " + sequenceOf(m.getBody()) + " "
                                + m.getBody().length + " " + crc(m.getBody()) + " " + m.getMsgId() + " " + m.getTags() + " "
                                + (m.getKeys() == null ? "null" : m.getKeys().replace(' ', ',')));
                            count++;
                            bytes += m.getBody().length;
                        }
                    } else if (position == result.getNextBeginOffset()) empty++;
                    position = result.getNextBeginOffset();
                }
            }
        }
        consumer.shutdown();
        emit("done", "count", count, "bytes", bytes, "queues", queues.size());
    }

    void push() throws Exception {
        int count = number("count", 1);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(text("group"), hook(), new AllocateMessageQueueAveragely());
        consumer.setNamesrvAddr(text("nameServer"));
        consumer.setInstanceName("c" + System.nanoTime());
        consumer.setVipChannelEnabled(false);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPollNameServerInterval(1000);
        if (options.containsKey("popInvisibleMs")) {  // 5.x only: the broker assigns queues, and says that they are popped
            consumer.getClass().getMethod("setClientRebalance", boolean.class).invoke(consumer, false);
            consumer.getClass().getMethod("setPopInvisibleTime", long.class).invoke(consumer, (long) number("popInvisibleMs", 0));
        }
        consumer.subscribe(text("topic"), options.getOrDefault("tags", "*"));
        CountDownLatch left = new CountDownLatch(count);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt m : messages) {
                emit("got", "sequence", sequenceOf(m.getBody()), "queueId", m.getQueueId(), "queueOffset", m.getQueueOffset(), "crc", crc(m.getBody()),
                    "msgId", m.getMsgId(), "tags", m.getTags(), "ageMs", System.currentTimeMillis() - m.getStoreTimestamp());
                left.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        emit("started", "clientId", consumer.getDefaultMQPushConsumerImpl().getmQClientFactory().getClientId());
        left.await(number("limitS", 60), TimeUnit.SECONDS);
        consumer.shutdown();
        emit("done", "missing", left.getCount());
    }

    void offsets() throws Exception {
        DefaultMQPullConsumer consumer = puller(text("group"));
        List<MessageQueue> queues = new ArrayList<>(consumer.fetchSubscribeMessageQueues(text("topic")));
        Collections.sort(queues);
        for (MessageQueue queue : queues) {
            if (options.containsKey("commit")) {
                String[] commit = options.get("commit").split(":");
                if (queue.getQueueId() == Integer.parseInt(commit[0]))
                    consumer.getOffsetStore().updateConsumeOffsetToBroker(queue, Long.parseLong(commit[1]), false);
            }
            emit("queue", "queueId", queue.getQueueId(), "min", consumer.minOffset(queue), "max", consumer.maxOffset(queue),
                "committed", consumer.getOffsetStore().readOffset(queue, ReadOffsetType.READ_FROM_STORE));
        }
        consumer.shutdown();
        emit("done", "queues", queues.size());
    }
}
