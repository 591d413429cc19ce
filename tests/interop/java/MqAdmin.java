// RocketMQ's command mqadmin, one command after the other in one JVM, driven over stdin by tests/interop/mqadmin.py.
//
// A command is one line of arguments separated by tabs; the answer is one line, a JSON string: all that the command printed to
// standard output and, behind it, to standard error. The end of stdin ends the process.
import java.io.*;
import java.nio.charset.StandardCharsets;
import org.apache.rocketmq.tools.command.MQAdminStartup;

public class MqAdmin {
    /** A 5.x client that shuts down waits up to three seconds for a thread that waits for events; this wakes it. */
    static void wakeIdleThreads() {
        Thread waker = new Thread(() -> {
            while (true) {
                for (Thread thread : Thread.getAllStackTraces().keySet())
                    if (thread.getName().contains("NettyEventExecutor")) thread.interrupt();
                try { Thread.sleep(100); } catch (InterruptedException e) { return; }
            }
        });
        waker.setDaemon(true);
        waker.start();
    }

    public static void main(String[] args) throws Exception {
        wakeIdleThreads();
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        PrintStream out = System.out;
        for (String line; (line = commands.readLine()) != null; ) {
            ByteArrayOutputStream printed = new ByteArrayOutputStream();
            ByteArrayOutputStream complained = new ByteArrayOutputStream();
            System.setOut(new PrintStream(printed, true, "UTF-8"));
            System.setErr(new PrintStream(complained, true, "UTF-8"));
            MQAdminStartup.main0(line.split("\t"), null);
            out.println(InteropClient.quote(printed.toString("UTF-8") + complained.toString("UTF-8")));
            out.flush();
        }
        Runtime.getRuntime().halt(0);
    }
}
