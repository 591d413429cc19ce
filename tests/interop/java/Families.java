// One command for each kind of use of a cluster that tests/interop/test_families.py compares; InteropClient reads the commands.
//   member   nameServer topic group member=NAME [listener=concurrent|orderly] [model=BROADCASTING] [limitS]
//            a push consumer of its group: an "owns" event whenever its queues change, a "got" event a message
//   deliver  nameServer topic count [first] [size] [kind=sync|oneway|batch] [queue] [compression=ZLIB|LZ4|ZSTD] [sizeMax] [untilS] [everyMs]
//            a "sent" event each with status or error; until untilS have passed one that failed is sent again
//   pull     nameServer topic group     DefaultMQPullConsumer on queue 0: an "answer" event for each thing it can ask
//   lite     nameServer topic group count     DefaultLitePullConsumer: subscribed, then with queue 0 assigned and sought
//   view     nameServer topic id=OFFSETMSGID     one "got" event
import java.util.*;
import java.util.concurrent.*;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.*;
import org.apache.rocketmq.client.consumer.listener.*;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.producer.*;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.*;

@SuppressWarnings("deprecation")
final class Families {
    private final InteropClient command;
    private final String nameServer, topic;

    private Families(InteropClient command) {
        this.command = command;
        nameServer = command.text("nameServer");
        topic = command.text("topic");
    }

    static void run(String name, InteropClient command) throws Exception {
        Families families = new Families(command);
        switch (name) {
            case "member": families.member(); break;
            case "deliver": families.deliver(); break;
            case "pull": families.pull(); break;
            case "lite": families.lite(); break;
            case "view": families.view(); break;
            default: throw new IllegalArgumentException("no command " + name);
        }
    }

    /** A loaded machine is no reason to give up. */
    private <T extends ClientConfig> T connected(T client, String instance) {
        client.setNamesrvAddr(nameServer);
        client.setInstanceName(instance);
        client.setVipChannelEnabled(false);
        client.setMqClientApiTimeout(30_000);
        return client;
    }

    private String option(String key, String otherwise) {
        return command.options.getOrDefault(key, otherwise);
    }

    private void got(MessageExt m) {
        command.emit("got", "at", System.nanoTime(), "sequence", InteropClient.sequenceOf(m.getBody()), "queueId", m.getQueueId(), "queueOffset", m.getQueueOffset(),
            "size", m.getBody().length, "crc", InteropClient.crc(m.getBody()), "sysFlag", m.getSysFlag(), "msgId", m.getMsgId(),
            "tags", m.getTags(), "keys", m.getKeys(), "reconsumeTimes", m.getReconsumeTimes(),
            "bornHost", ((java.net.InetSocketAddress) m.getBornHost()).getAddress().getHostAddress(),
            "storeHost", ((java.net.InetSocketAddress) m.getStoreHost()).getAddress().getHostAddress());
    }

    // ---- push ------------------------------------------------------------------------------------------------------------
    private void member() throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(command.text("group"), null, new AllocateMessageQueueAveragely());
        connected(consumer, command.text("member"));  // which queues are whose follows the order of client ids
        consumer.setClientIP("member");
        consumer.setUnitName(nameServer.replace(':', '-'));
        consumer.setPollNameServerInterval(1000);
        consumer.setHeartbeatBrokerInterval(1000);
        consumer.setPersistConsumerOffsetInterval(1000);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        if (command.options.containsKey("model")) setModel(consumer, command.text("model"));
        consumer.subscribe(topic, option("tags", "*"));
        if ("orderly".equals(option("listener", ""))) {
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                messages.forEach(this::got);
                return ConsumeOrderlyStatus.SUCCESS;
            });
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                messages.forEach(this::got);
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
        }
        consumer.start();
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(command.number("limitS", 600));
        TreeSet<Integer> owned = null;
        while (System.nanoTime() < deadline) {
            TreeSet<Integer> now = new TreeSet<>();
            for (MessageQueue queue : consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().keySet())
                if (queue.getTopic().equals(topic)) now.add(queue.getQueueId());
            if (!now.equals(owned)) command.emit("owns", "queues", now.toString(), "count", now.size());
            owned = now;
            Thread.sleep(50);
        }
        consumer.shutdown();
        command.emit("done");
    }

    /** The enumeration is in another package in 5.x. */
    private static void setModel(DefaultMQPushConsumer consumer, String model) throws Exception {
        Class<?> type = consumer.getMessageModel().getClass();
        Object value = type.getMethod("valueOf", String.class).invoke(null, model);
        DefaultMQPushConsumer.class.getMethod("setMessageModel", type).invoke(consumer, value);
    }

    // ---- send ------------------------------------------------------------------------------------------------------------
    private void deliver() throws Exception {
        int count = command.number("count", 1), first = command.number("first", 0), size = command.number("size", 100);
        String kind = option("kind", "sync");
        DefaultMQProducer producer = deliverer(option("compression", "ZLIB"));
        connected(producer, "p" + System.nanoTime());
        producer.setSendMsgTimeout(10_000);
        producer.setRetryTimesWhenSendFailed(0);
        producer.setDefaultTopicQueueNums(4);
        producer.setPollNameServerInterval(1000);
        producer.setMaxMessageSize(command.number("sizeMax", 4 << 20));
        if (!command.options.containsKey("compression")) producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        producer.start();
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(command.number("untilS", 0));
        List<Message> messages = new ArrayList<>();
        for (int sequence = first; sequence < first + count; sequence++) messages.add(message(sequence, size));
        if (kind.equals("batch")) {
            emit(first, producer.send(messages));
        } else if (kind.equals("oneway")) {
            for (Message message : messages) producer.sendOneway(message);
            Thread.sleep(500);  // nothing says when a one-way request has left
        } else {
            for (int i = 0; i < count; i++) {
                SendResult result = null;
                String error = "";
                do {
                    try {
                        Message message = message(first + i, size);  // anew: a failed send leaves its mark on the old one
                        result = command.options.containsKey("queue") ? producer.send(message, Families::byNumber, command.number("queue", 0))
                            : producer.send(message);
                    } catch (Exception e) {
                        error = InteropClient.brief(e);
                        Thread.sleep(100);
                    }
                } while (result == null && System.nanoTime() < deadline);
                Thread.sleep(command.number("everyMs", 0));
                if (result == null) command.emit("sent", "sequence", first + i, "status", "ERROR", "error", error);
                else emit(first + i, result);
            }
        }
        producer.shutdown();
        command.emit("done");
    }

    /** In 4.9 a producer is told its compression by a property alone. */
    private static synchronized DefaultMQProducer deliverer(String compression) {
        System.setProperty("rocketmq.message.compressType", compression);
        return new DefaultMQProducer("deliverer");
    }

    private static MessageQueue byNumber(List<MessageQueue> queues, Message message, Object number) {
        return queues.stream().filter(queue -> queue.getQueueId() == (Integer) number).findFirst().get();
    }

    private Message message(int sequence, int size) {
        byte[] body = InteropClient.body(sequence, size);
        // Noise gets no smaller when it is compressed.
        if (command.options.containsKey("compression")) Arrays.fill(body, 10, body.length, (byte) 'x');
        return new Message(topic, "T" + sequence % 2, "k" + sequence, body);
    }

    private void emit(long sequence, SendResult result) {
        command.emit("sent", "sequence", sequence, "status", result.getSendStatus(), "queueId", result.getMessageQueue().getQueueId(),
            "queueOffset", result.getQueueOffset(), "ids", result.getMsgId().split(",").length,
            "offsetIds", result.getOffsetMsgId().split(",").length, "offsetMsgId", result.getOffsetMsgId());
    }

    // ---- pull ------------------------------------------------------------------------------------------------------------
    private DefaultMQPullConsumer puller(String group) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer(group);
        connected(consumer, "l" + System.nanoTime());
        consumer.start();
        return consumer;
    }

    private void answer(String question, Object value) {
        command.emit("answer", "question", question, "value", value);
    }

    private void answer(String question, PullResult result) {
        answer(question, result.getPullStatus() + " " + (result.getMsgFoundList() == null ? 0 : result.getMsgFoundList().size())
            + " next " + result.getNextBeginOffset() + " of " + result.getMinOffset() + " to " + result.getMaxOffset());
    }

    private void pull() throws Exception {
        DefaultMQPullConsumer consumer = puller(command.text("group"));
        Set<MessageQueue> queues = consumer.fetchSubscribeMessageQueues(topic);
        answer("queues", queues.size());
        MessageQueue queue = queues.stream().filter(each -> each.getQueueId() == 0).findFirst().get();
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(30);
        while (consumer.maxOffset(queue) < command.number("count", 0) && System.nanoTime() < deadline) Thread.sleep(50);  // RocketMQ's queues follow its log
        long end = consumer.maxOffset(queue);
        answer("min", consumer.minOffset(queue));
        answer("max", end);
        answer("begin", consumer.searchOffset(queue, 0));
        answer("end", consumer.searchOffset(queue, System.currentTimeMillis() + 60_000));
        answer("earliest", System.currentTimeMillis() - consumer.earliestMsgStoreTime(queue) < 600_000);
        answer("all", consumer.pull(queue, "*", 0, 32));
        answer("three", consumer.pull(queue, "*", 2, 3));
        answer("tag", consumer.pull(queue, "T1", 0, 32));
        answer("no tag", consumer.pull(queue, "T7", 0, 32));
        answer("at the end", consumer.pull(queue, "*", end, 32));
        answer("beyond", consumer.pull(queue, "*", end + 100, 32));
        CompletableFuture<PullResult> waiting = new CompletableFuture<>();
        consumer.pullBlockIfNotFound(queue, "*", end, 32, new PullCallback() {
            public void onSuccess(PullResult result) { waiting.complete(result); }

            public void onException(Throwable e) { waiting.completeExceptionally(e); }
        });
        command.emit("waiting");
        answer("waited for", waiting.get(30, TimeUnit.SECONDS));
        answer("committed before", consumer.fetchConsumeOffset(queue, true));
        consumer.getOffsetStore().updateConsumeOffsetToBroker(queue, 3, false);
        answer("committed", consumer.fetchConsumeOffset(queue, true));
        consumer.shutdown();
        command.emit("done");
    }

    private DefaultLitePullConsumer litePuller() {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(command.text("group"));
        connected(consumer, "l" + System.nanoTime());
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setAutoCommit(false);
        return consumer;
    }

    private void poll(DefaultLitePullConsumer consumer, int count) {
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(30);
        while (count > 0 && System.nanoTime() < deadline) {
            for (MessageExt message : consumer.poll(1000)) {
                got(message);
                count--;
            }
        }
        if (count > 0) throw new IllegalStateException(count + " messages were not polled");
    }

    private void lite() throws Exception {
        DefaultLitePullConsumer consumer = litePuller();
        consumer.subscribe(topic, "*");
        consumer.start();
        poll(consumer, command.number("count", 1));
        consumer.commitSync();
        Thread.sleep(500);
        TreeMap<Integer, Long> committed = new TreeMap<>();
        for (MessageQueue queue : consumer.assignment()) committed.put(queue.getQueueId(), consumer.committed(queue));
        answer("committed", committed.toString());
        consumer.shutdown();
        answer("again", "");
        DefaultLitePullConsumer assigned = litePuller();
        assigned.start();
        MessageQueue first = assigned.fetchMessageQueues(topic).stream().filter(queue -> queue.getQueueId() == 0).findFirst().get();
        assigned.assign(Collections.singletonList(first));
        // A pull that begins just then would take the offset that is sought, and be dropped with it: let it wait at its broker first.
        Thread.sleep(1000);
        assigned.seek(first, 2);
        poll(assigned, (int) (committed.get(0) - 2));
        assigned.shutdown();
        command.emit("done");
    }

    private void view() throws Exception {
        DefaultMQPullConsumer consumer = puller("viewers");
        got(consumer.viewMessage(topic, command.text("id")));
        consumer.shutdown();
        command.emit("done");
    }
}
