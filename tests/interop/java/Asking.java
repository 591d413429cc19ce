// Consumers that ask for more than tags, and producers that ask for replies; InteropClient reads the commands.
//   select   nameServer topic group condition=BASE64 wanted=COUNT     sends 20 messages with properties, then a push consumer with a
//            condition on them: "started", a "got" event a message until it has got `wanted`, and a second more; or "refused"
//   request  nameServer topic    producers that ask and a consumer that replies: "answered", "late" and "told" events
import java.nio.charset.StandardCharsets;
import java.util.*;
import java.util.concurrent.*;
import org.apache.rocketmq.client.consumer.*;
import org.apache.rocketmq.client.consumer.listener.*;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.exception.*;
import org.apache.rocketmq.client.producer.*;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.*;

final class Asking {
    private static final String[] NAMES = {"", "abc", "it's", "true", "\u4e2d\u6587"};

    private Asking() { }

    private static DefaultMQProducer producer(InteropClient command, String group) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer(group);
        producer.setNamesrvAddr(command.text("nameServer"));
        producer.setInstanceName("p" + System.nanoTime());
        producer.setVipChannelEnabled(false);
        producer.setHeartbeatBrokerInterval(500);
        producer.start();
        return producer;
    }

    private static DefaultMQPushConsumer consumer(InteropClient command, String group) {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group, null, new AllocateMessageQueueAveragely());
        consumer.setNamesrvAddr(command.text("nameServer"));
        consumer.setInstanceName("c" + System.nanoTime());
        consumer.setVipChannelEnabled(false);
        consumer.setPollNameServerInterval(1000);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        return consumer;
    }

    private static void send(DefaultMQProducer producer, String topic, int first, int count) throws Exception {
        for (int i = first; i < first + count; i++) {
            Message message = new Message(topic, "Tag" + i % 3, InteropClient.body(i, 20));
            message.putUserProperty("number", String.valueOf(i));
            message.putUserProperty("ratio", String.valueOf(i / 4.0));
            if (!NAMES[i % 5].isEmpty()) message.putUserProperty("name", NAMES[i % 5]);
            producer.send(message);
        }
    }

    static void select(InteropClient command) throws Exception {
        String topic = command.text("topic");
        String condition = new String(Base64.getDecoder().decode(command.text("condition")), StandardCharsets.UTF_8);
        CountDownLatch missing = new CountDownLatch(command.number("wanted", 0));
        DefaultMQProducer producer = producer(command, "p-select");
        send(producer, topic, 0, 10);
        DefaultMQPushConsumer consumer = consumer(command, command.text("group"));
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt m : messages) {
                command.emit("got", "sequence", InteropClient.sequenceOf(m.getBody()), "number", m.getUserProperty("number"));
                missing.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.subscribe(topic, MessageSelector.bySql(condition));
        try {
            consumer.start();
        } catch (MQClientException refused) {
            Throwable cause = refused.getCause() == null ? refused : refused.getCause();
            int code = cause instanceof MQClientException ? ((MQClientException) cause).getResponseCode() : 0;
            command.emit("refused", "code", refused.getResponseCode() > 0 ? refused.getResponseCode() : code);
            command.emit("done");
            return;
        }
        command.emit("started");
        Thread.sleep(1500);
        send(producer, topic, 10, 10);  // to a pull that waits
        missing.await(30, TimeUnit.SECONDS);
        Thread.sleep(1000);
        consumer.shutdown();
        producer.shutdown();
        command.emit("done", "missing", missing.getCount());
    }

    static void request(InteropClient command) throws Exception {
        String topic = command.text("topic");
        DefaultMQProducer replier = producer(command, "p-reply"), asker = producer(command, "p-ask");
        send(asker, topic, 0, 1);  // makes the topic
        BlockingQueue<MessageExt> questions = new LinkedBlockingQueue<>();
        DefaultMQPushConsumer consumer = consumer(command, "g-reply");
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt m : messages) if (m.getProperty(MessageConst.PROPERTY_MESSAGE_REPLY_TO_CLIENT) != null) questions.add(m);
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        Thread.sleep(1500);  // a reply finds only a client that has sent a heartbeat since it knows its broker
        ExecutorService askers = Executors.newFixedThreadPool(3);
        for (int i = 1; i <= 3; i++) {
            int number = i;
            askers.submit(() -> {
                Message answer = asker.request(new Message(topic, InteropClient.body(number, 20)), 20_000);
                command.emit("answered", "sequence", InteropClient.sequenceOf(answer.getBody()), "topic", answer.getTopic(), "asked", number,
                    "flag", answer.getFlag(), "type", answer.getProperty(MessageConst.PROPERTY_MESSAGE_TYPE));
                return null;
            });
        }
        for (int i = 1; i <= 3; i++) {
            MessageExt question = questions.poll(30, TimeUnit.SECONDS);
            long sequence = InteropClient.sequenceOf(question.getBody());
            SendResult told = replier.send(MessageUtil.createReplyMessage(question, InteropClient.body(100 + sequence, 20)), 10_000);
            command.emit("told", "status", told.getSendStatus(), "queueId", told.getMessageQueue().getQueueId(), "asked", sequence);
        }
        askers.shutdown();
        askers.awaitTermination(30, TimeUnit.SECONDS);
        try {
            asker.request(new Message(topic, InteropClient.body(4, 20)), 1000);
        } catch (RequestTimeoutException late) {
            command.emit("late", "error", late.getClass().getSimpleName());
        }
        MessageExt forgotten = questions.poll(30, TimeUnit.SECONDS);
        // Who asked is there, but has given up: it takes the reply and drops it.
        SendResult told = replier.send(MessageUtil.createReplyMessage(forgotten, InteropClient.body(104, 20)), 10_000);
        command.emit("told", "status", told.getSendStatus(), "queueId", told.getMessageQueue().getQueueId(), "asked", 4);
        asker.shutdown();
        Thread.sleep(500);
        try {
            replier.send(MessageUtil.createReplyMessage(forgotten, InteropClient.body(105, 20)), 10_000);
        } catch (MQClientException gone) {
            command.emit("told", "status", gone.getResponseCode(), "queueId", -1, "asked", 5);
        }
        consumer.shutdown();
        replier.shutdown();
        command.emit("done");
    }
}
