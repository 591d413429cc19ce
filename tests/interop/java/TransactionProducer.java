// A producer of transactions: one message for each word of `plan`, numbered from `first`.
// A word says what the local transaction ends with, then what the answers to the broker's questions are:
// "commit", "rollback", "unknown-commit", "unknown-rollback", "unknown-unknown-commit".
// Events: "sent" for each, "asked" for each question, "done" when `asked` questions were answered and `lingerMs` are over.
import java.nio.charset.StandardCharsets;
import java.util.*;
import java.util.concurrent.*;
import org.apache.rocketmq.client.producer.*;
import org.apache.rocketmq.common.message.*;

final class TransactionProducer {
    private TransactionProducer() { }

    static LocalTransactionState state(String word, int number) {
        String[] parts = word.split("-");
        switch (parts[Math.min(number, parts.length - 1)]) {
            case "commit": return LocalTransactionState.COMMIT_MESSAGE;
            case "rollback": return LocalTransactionState.ROLLBACK_MESSAGE;
            default: return LocalTransactionState.UNKNOW;
        }
    }

    static void run(InteropClient command) throws Exception {
        String[] plan = command.text("plan").split(",");
        int first = command.number("first", 1);
        CountDownLatch left = new CountDownLatch(command.number("asked", 0));
        Map<Long, Integer> times = new ConcurrentHashMap<>();
        TransactionMQProducer producer = new TransactionMQProducer(command.text("group"), command.hook());
        producer.setNamesrvAddr(command.text("nameServer"));
        producer.setInstanceName("t" + System.nanoTime());
        producer.setVipChannelEnabled(false);
        producer.setHeartbeatBrokerInterval(500);
        producer.setTransactionListener(new TransactionListener() {
            @Override public LocalTransactionState executeLocalTransaction(Message message, Object word) {
                return state((String) word, 0);
            }

            @Override public LocalTransactionState checkLocalTransaction(MessageExt m) {
                long sequence = InteropClient.sequenceOf(m.getBody());
                int time = times.merge(sequence, 1, Integer::sum);
                command.emit("asked", "sequence", sequence, "topic", m.getTopic(), "queueId", m.getQueueId(), "time", time,
                    "checkTimes", m.getProperty(MessageConst.PROPERTY_TRANSACTION_CHECK_TIMES),
                    "queueOffset", m.getQueueOffset(), "tags", m.getTags(),
                    "isTransactionId", m.getProperty(MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX).equals(m.getTransactionId()));
                left.countDown();
                return state(plan[(int) sequence - first], time);
            }
        });
        producer.start();
        // A broker knows its producers from their heartbeats, which go to the brokers of topics that they have sent to.
        producer.send(new Message(command.text("topic"), "TagA", InteropClient.body(first - 1, 10)));
        Thread.sleep(2000);
        for (int i = 0; i < plan.length; i++) {
            byte[] body = String.format("%010d", first + i).getBytes(StandardCharsets.US_ASCII);
            Message message = new Message(command.text("topic"), "TagA", body);
            TransactionSendResult result = producer.sendMessageInTransaction(message, plan[i]);
            command.emit("sent", "sequence", first + i, "status", result.getSendStatus(),
                "state", result.getLocalTransactionState(), "queueOffset", result.getQueueOffset());
        }
        left.await(command.number("limitS", 60), TimeUnit.SECONDS);
        Thread.sleep(command.number("lingerMs", 0));
        producer.shutdown();
        command.emit("done", "missing", left.getCount());
    }
}
