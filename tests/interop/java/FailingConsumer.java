// A push consumer that can't consume anything: "started", then a "got" event for each attempt, and "done" after `count` of them.
// `times` is the consumer's own maximum of reconsumptions; default: the group's.
import java.util.concurrent.*;
import org.apache.rocketmq.client.consumer.*;
import org.apache.rocketmq.client.consumer.listener.*;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.*;

final class FailingConsumer {
    private FailingConsumer() { }

    static void run(InteropClient command) throws Exception {
        DefaultMQPushConsumer consumer =
            new DefaultMQPushConsumer(command.text("group"), command.hook(), new AllocateMessageQueueAveragely());
        consumer.setNamesrvAddr(command.text("nameServer"));
        consumer.setInstanceName("c" + System.nanoTime());
        consumer.setVipChannelEnabled(false);
        consumer.setPollNameServerInterval(1000);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        if (command.options.containsKey("times")) consumer.setMaxReconsumeTimes(command.number("times", 0));
        consumer.subscribe(command.text("topic"), "*");
        CountDownLatch left = new CountDownLatch(command.number("count", 1));
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt m : messages) {
                command.emit("got", "sequence", InteropClient.sequenceOf(m.getBody()), "topic", m.getTopic(), "queueId", m.getQueueId(),
                    "reconsumeTimes", m.getReconsumeTimes(), "msgId", m.getMsgId(), "delay", m.getDelayTimeLevel(),
                    "retryTopic", m.getProperty(MessageConst.PROPERTY_RETRY_TOPIC), "tags", m.getTags(),
                    "originMsgId", m.getProperty(MessageConst.PROPERTY_ORIGIN_MESSAGE_ID),
                    "at", System.currentTimeMillis(), "stored", m.getStoreTimestamp());
                left.countDown();
            }
            return ConsumeConcurrentlyStatus.RECONSUME_LATER;
        });
        consumer.start();
        command.emit("started");
        left.await(command.number("limitS", 60), TimeUnit.SECONDS);
        Thread.sleep(1000);  // the last failures are reported after the listener has returned
        consumer.shutdown();
        command.emit("done", "missing", left.getCount());
    }
}
