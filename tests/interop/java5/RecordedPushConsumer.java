package org.apache.rocketmq.client.java.impl.consumer;

import apache.rocketmq.v2.AckMessageRequest;
import apache.rocketmq.v2.AckMessageResponse;
import apache.rocketmq.v2.ChangeInvisibleDurationRequest;
import apache.rocketmq.v2.ChangeInvisibleDurationResponse;
import apache.rocketmq.v2.Code;
import apache.rocketmq.v2.ReceiveMessageRequest;
import java.time.Duration;
import java.time.Instant;
import java.util.Collections;
import java.util.Map;
import java.util.Set;
import java.util.WeakHashMap;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.MessageListener;
import org.apache.rocketmq.client.java.message.MessageViewImpl;
import org.apache.rocketmq.client.java.route.MessageQueueImpl;
import org.apache.rocketmq.client.java.rpc.RpcFuture;
import org.apache.rocketmq.shaded.com.google.common.util.concurrent.Futures;
import org.apache.rocketmq.shaded.com.google.common.util.concurrent.ListenableFuture;
import org.apache.rocketmq.shaded.com.google.common.util.concurrent.MoreExecutors;

/**
 * A PushConsumer that tells what it is given and what becomes of it. It is in this package because the client offers no
 * other way to learn when it asked for a message, and when its acknowledgement was answered.
 */
public final class RecordedPushConsumer extends PushConsumerImpl {
    private static final int CACHED_COUNT_MAX = 1024;
    private static final int CACHED_BYTES_MAX = 64 * 1024 * 1024;

    private final Journal journal;
    private final Map<MessageViewImpl, String> handles = Collections.synchronizedMap(new WeakHashMap<>());

    /** What a consumer tells. {@code handle}: the one that a message came with. */
    public interface Journal {
        void given(MessageViewImpl view, Instant asked);

        void hidden(String handle, Instant until);

        void acknowledging(String handle);

        void acknowledged(String handle);
    }

    public RecordedPushConsumer(
        ClientConfiguration configuration, String group, Map<String, FilterExpression> subscriptions,
        MessageListener listener, int threads, Journal journal
    ) {
        super(configuration, group, subscriptions, listener, CACHED_COUNT_MAX, CACHED_BYTES_MAX, threads);
        this.journal = journal;
    }

    /** Returns when it consumes. */
    public void start() {
        startAsync().awaitRunning();
    }

    @Override
    protected ListenableFuture<ReceiveMessageResult> receiveMessage(
        ReceiveMessageRequest request, MessageQueueImpl queue, Duration await
    ) {
        Instant asked = Instant.now();
        return Futures.transform(super.receiveMessage(request, queue, await), result -> {
            for (MessageViewImpl view : result.getMessageViewImpls()) {
                handles.put(view, view.getReceiptHandle());  // a change of the invisible time replaces it
                journal.given(view, asked);
            }
            return result;
        }, MoreExecutors.directExecutor());
    }

    @Override
    protected RpcFuture<AckMessageRequest, AckMessageResponse> ackMessage(MessageViewImpl view) {
        String handle = handles.get(view);
        journal.acknowledging(handle);
        RpcFuture<AckMessageRequest, AckMessageResponse> answer = super.ackMessage(view);
        answer.addListener(() -> {
            if (isDone(answer)) {
                journal.acknowledged(handle);
            }
        }, MoreExecutors.directExecutor());
        return answer;
    }

    @Override
    RpcFuture<ChangeInvisibleDurationRequest, ChangeInvisibleDurationResponse> changeInvisibleDuration(
        MessageViewImpl view, Duration duration
    ) {
        journal.hidden(handles.get(view), Instant.now().plus(duration));
        return super.changeInvisibleDuration(view, duration);
    }

    private static boolean isDone(RpcFuture<AckMessageRequest, AckMessageResponse> answer) {
        try {
            return Futures.getDone(answer).getStatus().getCode() == Code.OK;
        } catch (Exception failed) {
            return false;
        }
    }
}
