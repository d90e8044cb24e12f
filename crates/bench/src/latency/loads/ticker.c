// Wakes each millisecond by an absolute time, and tells how late it was done with a few reads and writes of its memory.
//
//     ticker MIB TICKS SOCKET|-      0 ticks: until nobody listens
//
// Each tick is two numbers of 8 bytes: when it was due by CLOCK_MONOTONIC, and how long after that it was done, in nanoseconds.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { WORDS = 512, READS = 16, WRITE_ONE_IN = 10, AT_ONCE = 100, TICK_NS = 1000000 };

static uint64_t number = 88172645463325252u;

static uint64_t next(void) {
    number ^= number << 13;
    number ^= number >> 7;
    number ^= number << 17;
    return number;
}

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static int connected(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address)) exit(2);
    return fd;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    uint64_t pages = strtoull(argv[1], 0, 10) << 8, ticks = strtoull(argv[2], 0, 10);
    int out = strcmp(argv[3], "-") ? connected(argv[3]) : 1;
    volatile uint64_t *memory =
        mmap(0, pages << 12, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || !pages) return 2;
    // All pages differ, and two programs have the same.
    for (uint64_t i = 0; i < pages * WORDS; i++) memory[i] = next();
    prctl(PR_SET_TIMERSLACK, 1);
    static uint64_t told[AT_ONCE][2];
    uint64_t due = now(), sum = 0;
    for (uint64_t n = 0; !ticks || n < ticks; n++) {
        due += TICK_NS;
        struct timespec until = {due / 1000000000, due % 1000000000};
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, 0)) {
        }
        for (int i = 0; i < READS; i++) sum += memory[next() % pages * WORDS];
        // The bytes stay, so that the page can be folded again.
        if (n % WRITE_ONE_IN == 0) {
            uint64_t at = next() % pages * WORDS;
            memory[at] = memory[at];
        }
        told[n % AT_ONCE][0] = due;
        told[n % AT_ONCE][1] = now() - due;
        if (n % AT_ONCE == AT_ONCE - 1 && write(out, told, sizeof told) != sizeof told) return 1;
    }
    return sum == 1;
}
