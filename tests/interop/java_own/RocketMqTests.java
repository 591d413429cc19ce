// Runs classes of RocketMQ's own integration tests (org.apache.rocketmq:rocketmq-test, classifier "tests") against a cluster that
// is already there, for tests/interop/own_tests.py.
//
//   RocketMqTests NAME_SERVER_PORT CLUSTER NAME:PORT[,NAME:PORT...]
//
// The base class of those tests starts a name server and brokers in their own JVM; here it gets controllers that were never
// started and only say where the cluster is. Class names come in over stdin, one a line; a JSON line goes out for each test and one
// for the end of each class. The end of stdin ends the process.
import java.io.*;
import java.nio.charset.StandardCharsets;
import java.util.*;
import net.bytebuddy.ByteBuddy;
import net.bytebuddy.dynamic.ClassFileLocator;
import net.bytebuddy.dynamic.loading.ClassLoadingStrategy;
import net.bytebuddy.implementation.MethodDelegation;
import net.bytebuddy.matcher.ElementMatchers;
import net.bytebuddy.pool.TypePool;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.namesrv.NamesrvConfig;
import org.apache.rocketmq.namesrv.NamesrvController;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.junit.runner.Description;
import org.junit.runner.JUnitCore;
import org.junit.runner.notification.Failure;
import org.junit.runner.notification.RunListener;

public class RocketMqTests {
    static final String BASE = "org.apache.rocketmq.test.base.IntegrationTestBase";
    static int nameServerPort, nextBroker;
    static String cluster;
    static String[] brokers;

    // ---- in place of the base class's own ------------------------------------------------------------------------------
    public static class Running {
        public static NamesrvController createAndStartNamesrv() {
            NettyServerConfig port = new NettyServerConfig();
            port.setListenPort(nameServerPort);
            return new NamesrvController(new NamesrvConfig(), port);
        }

        public static BrokerController createAndStartBroker(String nameServer) {
            String[] broker = brokers[nextBroker++].split(":");
            NettyServerConfig port = new NettyServerConfig();
            port.setListenPort(Integer.parseInt(broker[1]));
            BrokerConfig config = new BrokerConfig();
            config.setBrokerClusterName(cluster);
            config.setBrokerName(broker[0]);
            config.setBrokerIP1("127.0.0.1");
            config.setNamesrvAddr(nameServer);
            MessageStoreConfig store = new MessageStoreConfig();
            store.setStorePathRootDir(System.getProperty("user.home") + "/" + broker[0]);
            BrokerController controller = new BrokerController(config, port, new NettyClientConfig(), store);
            controller.getBrokerOuterAPI().updateNameServerAddressList(nameServer);  // by which tests of 5.x look at the cluster
            controller.getBrokerOuterAPI().start();
            return controller;
        }
    }

    static void redefine() {
        ClassLoader loader = RocketMqTests.class.getClassLoader();
        ClassFileLocator files = ClassFileLocator.ForClassLoader.of(loader);
        new ByteBuddy()
            .redefine(TypePool.Default.of(files).describe(BASE).resolve(), files)
            .method(ElementMatchers.named("createAndStartNamesrv")
                .or(ElementMatchers.named("createAndStartBroker").and(ElementMatchers.takesArguments(String.class))))
            .intercept(MethodDelegation.to(Running.class))
            .make()
            .load(loader, ClassLoadingStrategy.Default.INJECTION);
    }

    // ---- running ---------------------------------------------------------------------------------------------------------
    static PrintStream out;

    static synchronized void emit(String event, String name, String outcome, double seconds, String text) {
        out.println("{\"event\":" + quote(event) + ",\"name\":" + quote(name) + ",\"outcome\":" + quote(outcome)
            + ",\"seconds\":" + String.format(Locale.ROOT, "%.1f", seconds) + ",\"text\":" + quote(text) + "}");
        out.flush();
    }

    static String quote(String text) {
        StringBuilder quoted = new StringBuilder("\"");
        for (char c : text.toCharArray()) {
            if (c == '"' || c == '\\') quoted.append('\\').append(c);
            else if (c < ' ' || c > '~') quoted.append(String.format("\\u%04x", (int) c));
            else quoted.append(c);
        }
        return quoted.append('"').toString();
    }

    static class Reporter extends RunListener {
        final Map<String, Long> started = new HashMap<>();
        final Map<String, Failure> failed = new HashMap<>();

        static String name(Description test) {
            return test.getTestClass().getSimpleName() + "." + test.getMethodName();
        }

        public void testStarted(Description test) {
            started.put(name(test), System.nanoTime());
        }

        public void testFailure(Failure failure) {
            Description test = failure.getDescription();
            if (test.isTest() && started.containsKey(name(test))) failed.put(name(test), failure);
            else emit("test", test.getDisplayName(), "failed", 0, text(failure));
        }

        public void testAssumptionFailure(Failure failure) {
            emit("test", name(failure.getDescription()), "skipped", 0, text(failure));
        }

        public void testIgnored(Description test) {
            emit("test", test.isTest() ? name(test) : test.getTestClass().getSimpleName(), "ignored", 0, "");
        }

        public void testFinished(Description test) {
            Failure failure = failed.remove(name(test));
            double seconds = (System.nanoTime() - started.get(name(test))) / 1e9;
            emit("test", name(test), failure == null ? "passed" : "failed", seconds, failure == null ? "" : text(failure));
        }

        static String text(Failure failure) {
            String trace = failure.getTrace();
            return trace.substring(0, Math.min(trace.length(), 3000));
        }
    }

    public static void main(String[] arguments) throws Exception {
        nameServerPort = Integer.parseInt(arguments[0]);
        cluster = arguments[1];
        brokers = arguments[2].split(",");
        out = System.out;
        System.setOut(System.err);
        redefine();
        JUnitCore core = new JUnitCore();
        core.addListener(new Reporter());
        BufferedReader classes = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String name; (name = classes.readLine()) != null; ) {
            long start = System.nanoTime();
            String text = "";
            try {
                core.run(Class.forName(name));
            } catch (Throwable e) {
                text = e.toString();
            }
            emit("class", name, text.isEmpty() ? "done" : "failed", (System.nanoTime() - start) / 1e9, text);
        }
        Runtime.getRuntime().halt(0);
    }
}
