// What RocketMQ's own filter makes of expressions: lines in, lines out. A line in is "E <expression>" or "P name=value ..." (all escaped as
// in Java's properties files); a line out for each P: T, F, N (unknown), X (an exception while evaluating) or E (no expression).
import java.io.*;
import java.nio.charset.StandardCharsets;
import java.util.*;
import org.apache.rocketmq.filter.FilterFactory;
import org.apache.rocketmq.filter.expression.*;

final class SqlFilterTable {
    private SqlFilterTable() { }

    public static void main(String[] arguments) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        StringBuilder out = new StringBuilder();
        Expression compiled = null;
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] fields = line.split("\t", -1);
            if (fields[0].equals("E")) {
                try {
                    compiled = FilterFactory.INSTANCE.get("SQL92").compile(unescape(fields[1]));
                } catch (MQFilterException refused) {
                    compiled = null;
                }
            } else {
                Map<String, Object> properties = new HashMap<>();
                for (int i = 1; i + 1 < fields.length; i += 2) properties.put(unescape(fields[i]), unescape(fields[i + 1]));
                out.append(compiled == null ? "E" : evaluate(compiled, properties)).append('\n');
            }
        }
        System.out.write(out.toString().getBytes(StandardCharsets.UTF_8));
        System.out.flush();
    }

    private static String evaluate(Expression compiled, Map<String, Object> properties) {
        try {
            Object value = compiled.evaluate(new EvaluationContext() {
                @Override public Object get(String name) { return properties.get(name); }
                @Override public Map<String, Object> keyValues() { return properties; }
            });
            return value == null ? "N" : value instanceof Boolean ? (Boolean) value ? "T" : "F" : "?";
        } catch (Exception thrown) {
            return "X";
        }
    }

    private static String unescape(String text) throws IOException {
        Properties one = new Properties();
        one.load(new StringReader("k=" + text));
        return one.getProperty("k");
    }
}
