// Holds arrays of a few contents, lets them rest, checks them, gives some back and takes new ones, which must hold zeros.

import java.util.Random;

public class Heap {
    static final int ARRAY_BYTES = 1 << 16, ARRAYS = 1024, CONTENTS = 16;
    static long checks, freed, fresh;

    static byte value(int content, int at) {
        int x = (content << 16 | at & 4095) * 0x9e3779b1;
        return (byte) (x >>> 13 | 1);
    }

    static byte[] filled(int content) {
        byte[] array = new byte[ARRAY_BYTES];
        for (int at = 0; at < array.length; at++) {
            if (array[at] != 0) throw new IllegalStateException("a fresh array holds " + array[at] + " at " + at);
            array[at] = value(content, at);
        }
        fresh++;
        return array;
    }

    static void check(byte[] array, int content) {
        for (int at = 0; at < array.length; at++)
            if (array[at] != value(content, at))
                throw new IllegalStateException("content " + content + ": " + array[at] + " at " + at);
        checks++;
    }

    public static void main(String[] words) throws Exception {
        long end = System.nanoTime() + Long.parseLong(words[0]) * 1_000_000_000L;
        byte[][] held = new byte[ARRAYS][];
        Random random = new Random(7);
        while (System.nanoTime() < end) {
            for (int i = 0; i < ARRAYS; i++) if (held[i] == null) held[i] = filled(i % CONTENTS);
            Thread.sleep(2000);
            for (int i = 0; i < ARRAYS; i++) {
                check(held[i], i % CONTENTS);
                if (random.nextInt(3) == 0) {
                    held[i] = null;
                    freed++;
                }
            }
            // Collects, moves what lives, and gives memory back to the kernel.
            System.gc();
            for (int i = 0; i < ARRAYS; i++) if (held[i] != null) check(held[i], i % CONTENTS);
        }
        System.out.println("{\"checks\": " + checks + ", \"freed\": " + freed + ", \"fresh\": " + fresh + "}");
    }
}
