// Every key of a broker.conf with the value that a broker of this release has without one, a line key=value for each.
import java.util.TreeMap;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.store.config.MessageStoreConfig;

final class Defaults {
    private Defaults() { }

    public static void main(String[] arguments) {
        TreeMap<Object, Object> all = new TreeMap<>();
        for (Object config : new Object[] {new BrokerConfig(), new NettyServerConfig(), new MessageStoreConfig()}) {
            all.putAll(MixAll.object2Properties(config));
        }
        all.forEach((key, value) -> System.out.println(key + "=" + value));
    }
}
