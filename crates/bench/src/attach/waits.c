// Knows what every byte of its memory must be, and what its system calls must answer. For tests that attach to it.
//
//   stop    all threads stand still; answers "stopped ROUNDS INTERRUPTED"
//   go      they go on
//   break   a child is made, and many pages are written that rested; answers when they are
//   (end)   it ends
//
// Ends with another status than 0 as soon as anything is wrong: 3 a byte, 4 a call that was interrupted, or one that was
// not though a handler ran, 5 a wait that was too short or too long, 6 fresh memory that is not zeros, 7 a child,
// 8 a register, 9 a write that was cut short. With the argument "count", interrupted calls are counted, and nothing else. With
// "give-up-root", it has another user from the beginning on.
#define _GNU_SOURCE
#include <errno.h>
#include <grp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/sem.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGES = 3072, KINDS = 400, WRITTEN = 300, WORKERS = 6, PIPED = 120000, BROKEN = 800 };
static unsigned char *memory;
static uint32_t versions[PAGES];
static volatile int stopping;
static volatile int breaking, forking;
static volatile long rounds;
static pthread_barrier_t barrier;

static void fail(int status, const char *what) {
    fprintf(stderr, "waits: %s (errno %d)\n", what, errno);
    _exit(status);
}

static int counting;
static volatile long interrupted;

// A call must not have been interrupted.
static void fail_interrupted(const char *what) {
    if (!counting || errno != EINTR) fail(4, what);
    __sync_fetch_and_add(&interrupted, 1);
}

static uint32_t word(int page, int n) { return (uint32_t)(page % KINDS) * 77 + n + versions[page] * 1000003u; }

static void fill(int page) {
    uint32_t *at = (uint32_t *)(memory + 4096L * page);
    for (int n = 0; n < 1024; n++) at[n] = word(page, n);
}

static void check(int page) {
    uint32_t *at = (uint32_t *)(memory + 4096L * page);
    for (int n = 0; n < 1024; n += 31)
        if (at[n] != word(page, n)) fail(3, "a page has other bytes");
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

// Stands still while that is asked for.
static void rest(void) {
    if (!stopping) return;
    pthread_barrier_wait(&barrier);
    pthread_barrier_wait(&barrier);
}

static void *change_pages(void *unused) {
    for (unsigned seed = 1;; rest()) {
        for (int n = 0; n < 20; n++) {
            seed = seed * 1103515245 + 12345;
            int page = (seed >> 8) % WRITTEN;
            versions[page]++;
            fill(page);
        }
        // Of each of these contents, two pages are left.
        for (int page = WRITTEN; breaking && page < WRITTEN + BROKEN; page++) {
            versions[page]++;
            fill(page);
        }
        breaking = 0;
        for (int page = 0; page < PAGES; page++) check(page);
        rounds++;
        usleep(20000);
    }
    return unused;
}

static void *change_mappings(void *unused) {
    const size_t bytes = 1 << 20;
    for (;; rest()) {
        unsigned char *at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED) fail(6, "mmap");
        for (size_t n = 0; n < bytes; n += 4096) {
            if (at[n]) fail(6, "fresh memory is not zeros");
            memset(at + n, 7, 4096);
        }
        if (mprotect(at, bytes / 2, PROT_READ)) fail(6, "mprotect");
        if (madvise(at + bytes / 2, bytes / 2, MADV_DONTNEED)) fail(6, "madvise");
        for (size_t n = 0; n < bytes; n += 4096)
            if (at[n] != (n < bytes / 2 ? 7 : 0)) fail(3, "a page of a short-lived mapping");
        munmap(at, bytes);
        char *heap = malloc(200000);
        memset(heap, 1, 200000);
        free(heap);
        usleep(3000);
    }
    return unused;
}

// Waits with time limits, in calls that the kernel does not begin again by itself.
static void *wait_long(void *unused) {
    int epoll = epoll_create1(0);
    sigset_t none;
    sigemptyset(&none);
    sigaddset(&none, SIGUSR2);
    pthread_sigmask(SIG_BLOCK, &none, 0);
    for (int turn = 0;; turn++, rest()) {
        struct epoll_event event;
        struct timespec limit = {0, 300000000};
        struct sembuf take = {0, -1, 0};
        double began = now(), took;
        long before = interrupted;
        errno = 0;
        switch (turn % 3) {
        case 0: if (epoll_wait(epoll, &event, 1, 300) != 0) fail_interrupted("epoll_wait"); break;
        case 1: if (sigtimedwait(&none, 0, &limit) != -1 || errno != EAGAIN) fail_interrupted("sigtimedwait"); break;
        default: {
            int set = semget(IPC_PRIVATE, 1, 0600), answer = semtimedop(set, &take, 1, &limit), why = errno;
            semctl(set, 0, IPC_RMID);
            errno = why;
            if (answer != -1 || why != EAGAIN) fail_interrupted("semtimedop");
        }
        }
        took = now() - began;
        // An early end would be ours. A busy machine makes waits longer, but not by seconds without end.
        if (before == interrupted && (took < 0.28 || took > 20)) fail(5, "a wait of 300 ms");
    }
    return unused;
}

static void *make_children(void *unused) {
    // A page that a child had, too, is folded only after a while: so children are made when that is asked for.
    for (;; rest()) {
        if (!forking) {
            usleep(5000);
            continue;
        }
        forking = 0;
        pid_t child = fork();
        if (!child) {
            for (int page = 0; page < PAGES; page++)
                if (page >= WRITTEN + BROKEN) check(page);
            // Discarded memory reads as zeros in children, too.
            madvise(memory + 4096L * WRITTEN, 4096L * 64, MADV_DONTNEED);
            for (int page = WRITTEN; page < WRITTEN + 64; page++)
                if (memory[4096L * page]) _exit(1);
            _exit(0);
        }
        int status;
        if (waitpid(child, &status, 0) != child || status) fail(7, "a child");
    }
    return unused;
}

// Waits in a system call whose registers the compiler takes for unchanged afterwards.
static __attribute__((noinline)) long wait_bare(int epoll, struct epoll_event *event, long limit) {
    register long r10 asm("r10") = limit;
    register long rdx asm("rdx") = 1;
    register struct epoll_event *rsi asm("rsi") = event;
    register long rdi asm("rdi") = epoll;
    long answer = SYS_epoll_wait;
    asm volatile("syscall\nbehind_call:" : "+a"(answer), "+r"(r10), "+r"(rdx), "+r"(rsi), "+r"(rdi) : : "rcx", "r11", "memory");
    if (r10 != limit || rdx != 1 || rsi != event || rdi != epoll) fail(8, "a register has changed");
    return answer;
}

// How many signals were handled, and where the last one came.
static volatile long handled;
static volatile uintptr_t handled_at;
static void handle(int signal, siginfo_t *info, void *context) {
    handled += signal > 0 && info;
    handled_at = ((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
}

// Whether the last signal came in the call of wait_bare, and how often one came at its instruction. A thread that goes on from a stop may
// wait there for a processor, before the kernel begins the call again: that counts as before the call, if it is rare.
static int came_in_call(int turn) {
    extern const char behind_call[];
    static int at_call;
    at_call += handled_at == (uintptr_t)behind_call - 2;
    return handled_at == (uintptr_t)behind_call || (handled_at == (uintptr_t)behind_call - 2 && at_call > 2 + turn / 16);
}

// Is interrupted by signals that have a handler, each time, and by nothing else. A thread that gets no processor between the
// call that sets the timer and the one that waits may have its signal before that: it then waits for the whole time.
static void *take_signals(void *unused) {
    struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_RESTART | SA_SIGINFO};
    sigaction(SIGUSR1, &action, 0);
    signal(SIGWINCH, SIG_IGN);
    int epoll = epoll_create1(0);
    for (int turn = 0;; turn++, rest()) {
        struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = turn % 2 ? SIGUSR1 : SIGWINCH};
#ifdef __GLIBC__
        event._sigev_un._tid = syscall(SYS_gettid);
#else
        event.sigev_notify_thread_id = syscall(SYS_gettid);
#endif
        timer_t timer;
        if (timer_create(CLOCK_MONOTONIC, &event, &timer)) fail(4, "timer_create");
        struct itimerspec time = {.it_value = {0, 40000000}};
        long before = handled;
        timer_settime(timer, 0, &time, 0);
        struct epoll_event found;
        double began = now();
        long answer = wait_bare(epoll, &found, turn % 2 ? 5000 : 80);
        double took = now() - began;
        timer_delete(timer);
        errno = answer < 0 ? -answer : 0;
        // When the process is killed that has begun it again, it waits for its whole time again, after the handler.
        if (counting && turn % 2 && answer == 0) errno = EINTR;
        int is_in_call = turn % 2 && answer == 0 && handled == before + 1 && came_in_call(turn);
        int is_whole = answer == 0 && handled == before + 1 && !is_in_call && took >= 5;
        if (turn % 2 && !is_whole && (answer != -EINTR || handled != before + 1)) {
            if (!counting) fprintf(stderr, "waits: answer %ld, %ld handled, in the call: %d, %.3f s\n", answer, handled - before, is_in_call, took);
            fail_interrupted("a handler has not interrupted epoll_wait");
        }
        if (turn % 2 == 0 && answer != 0) fail_interrupted("an ignored signal has ended epoll_wait");
        if (turn % 2 == 0 && answer == 0 && took < 0.079) fail(5, "a wait of 80 ms has ended early");
    }
    return unused;
}

static int to_reader;

// Starts a child that reads from a pipe, slowly. It is made before there is memory to check, and has none of it.
static void start_reader(void) {
    int ends[2];
    if (pipe(ends)) fail(9, "pipe");
    to_reader = ends[1];
    if (fork()) {
        close(ends[0]);
        return;
    }
    close(ends[1]);
    static unsigned char part[4096];
    unsigned char next = 0;
    for (ssize_t got; (got = read(ends[0], part, sizeof part)) > 0; usleep(100))
        for (ssize_t n = 0; n < got; n++)
            if (part[n] != (next++ & 255)) kill(getppid(), SIGKILL);
    _exit(0);
}

// A blocking write to a pipe takes all there is to write.
static void *write_pipe(void *unused) {
    unsigned char *bytes = malloc(PIPED);
    unsigned char next = 0;
    for (;; rest()) {
        for (int n = 0; n < PIPED; n++) bytes[n] = next++;
        if (write(to_reader, bytes, PIPED) != PIPED) fail(9, "a write was cut short");
        usleep(50000);
    }
    return unused;
}

// With the argument "without-pipe", it writes to no pipe: when the process that had such a write begun again is killed, the write answers
// with its second part.
int main(int count, char **arguments) {
    for (int n = 1; n < count; n++)
        if (!strcmp(arguments[n], "give-up-root") && (setgroups(0, 0) || setgid(65534) || setuid(65534))) fail(9, "setuid");
    start_reader();
    memory = mmap(0, 4096L * PAGES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int page = 0; page < PAGES; page++) fill(page);
    pthread_barrier_init(&barrier, 0, WORKERS + 1);
    void *(*work[WORKERS])(void *) = {change_pages, change_mappings, wait_long, make_children, take_signals, write_pipe};
    pthread_t thread;
    for (int n = 1; n < count; n++) {
        if (!strcmp(arguments[n], "without-pipe")) work[WORKERS - 1] = change_mappings;
        counting |= !strcmp(arguments[n], "count");
    }
    for (int n = 0; n < WORKERS; n++) pthread_create(&thread, 0, work[n], 0);
    char line[80];
    while (fgets(line, sizeof line, stdin)) {
        if (!strncmp(line, "stop", 4)) {
            stopping = 1;
            pthread_barrier_wait(&barrier);
            printf("stopped %ld %ld\n", rounds, interrupted);
        } else if (!strncmp(line, "break", 5)) {
            breaking = forking = 1;
            while (breaking || forking) usleep(1000);
            puts("broken");
        } else {
            stopping = 0;
            pthread_barrier_wait(&barrier);
            puts("goes");
        }
        fflush(stdout);
    }
    return 0;
}
