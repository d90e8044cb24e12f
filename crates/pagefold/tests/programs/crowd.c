/* Children of a member discard memory that maps the pool, by a bare system call, all at once. Each has to read zeros there, also when
 * their parent has ended. They are made by the bare system call, too, and never end before.
 *
 *   cc -O1 -o crowd crowd.c; crowd CHILDREN [MILLISECONDS between two forks]
 *
 * Prints lines of JSON: how many children were made; and, once its input has ended, how many of them hung while their parent lived
 * or after its end, and have read something else. Says what the kernel tells of the first that hung. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

enum { PAGES = 2048, PAGE = 4096, MOST = 4096, PATIENCE = 60, DEATHS = 16 };
/* At an address that no memory of the program's names. */
#define told ((struct crowd *)0x600000000000)
struct crowd {
	volatile int made, rounds, over, done[2][MOST], wrong[MOST], pid[MOST], deaths, refused;
	struct { int pid, number; uintptr_t at, code; } death[DEATHS];
	char stack[DEATHS][2 * PAGE];
};

static long bare(long number, long a, long b, long c)
{
	long answer;
	__asm__ volatile("syscall" : "=a"(answer) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
	return answer;
}

static void rest(long ms) { bare(SYS_nanosleep, (long)&(struct timespec){ ms / 1000, ms % 1000 * 1000000 }, 0, 0); }

static size_t folded_kib(void)
{
	char line[512];
	unsigned long from, to;
	size_t kib = 0;
	FILE *maps = fopen("/proc/self/maps", "r");

	while (fgets(line, sizeof line, maps))
		if (strstr(line, "/memfd:pagefold-") && strstr(line, "rw-p") && sscanf(line, "%lx-%lx", &from, &to) == 2)
			kib += (to - from) >> 10;
	fclose(maps);
	return kib;
}

/* Notes that a child dies, and where. It has its own copy of the stack on which this runs, unless that is missing. */
static void die(int number, siginfo_t *why, void *context)
{
	int at = __atomic_fetch_add(&told->deaths, 1, __ATOMIC_SEQ_CST);

	if (at < DEATHS) {
		told->death[at].pid = (int)bare(SYS_getpid, 0, 0, 0);
		told->death[at].number = number;
		told->death[at].at = (uintptr_t)why->si_addr;
		told->death[at].code = (uintptr_t)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
	}
	_exit(1);
}

/* One page in each of two rounds: while its parent lives, and afterwards. */
static void child(char *area, int me)
{
	told->pid[me] = (int)bare(SYS_getpid, 0, 0, 0);
	for (int round = 0; round < 2; round++) {
		char *page = area + (size_t)((me + round * PAGES / 2) % PAGES) * PAGE;

		while (told->rounds <= round && !told->over)
			rest(50);
		bare(SYS_madvise, (long)page, PAGE, MADV_DONTNEED);
		told->wrong[me] += *(volatile uint64_t *)page != 0;
		told->done[round][me] = 1;
	}
	while (!told->over)
		rest(100);
	_exit(0);
}

/* The member. Its end is part of the test: children go on. */
static void member(int children, int pause)
{
	char *area[2];

	for (int which = 0; which < 2; which++) {
		area[which] = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		for (size_t word = 0; word < PAGES * PAGE / 8; word++)
			((uint64_t *)area[which])[word] = (word + 1) * 0x9e3779b97f4a7c15u | 1;
	}
	while (folded_kib() < 2 * PAGES * 4 * 9 / 10)
		rest(100);
	for (int me = 0; me < children; me++) {
		long pid = bare(SYS_fork, 0, 0, 0);

		if (!pid)
			child(area[0], me);
		if (pid < 0)
			told->refused = (int)-pid;
		told->made = me + 1;
		if (pause)
			rest(pause);
	}
	while (told->rounds < 2)
		rest(50);
	_exit(0);
}

/* Waits for all children. Returns how many do nothing any more. */
static int hang(int round, int children)
{
	for (int waited = 0;; waited++) {
		int left = 0;

		for (int me = 0; me < children; me++)
			left += !told->done[round][me];
		if (!left || waited > PATIENCE * 10)
			return left;
		rest(100);
	}
}

/* Prints a file of a process as a field, of which a line is enough: after `from`, if that is given. */
static void tell(const char *file, const char *from, int pid)
{
	char path[64], text[4096] = "", *line = text;
	FILE *open;

	snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
	if ((open = fopen(path, "r"))) {
		text[fread(text, 1, sizeof text - 1, open)] = 0;
		fclose(open);
	}
	if (from && strstr(text, from))
		line = strstr(text, from) + strlen(from);
	for (char *at = line; *at; at++)
		if (*at == '\n' && !strcmp(file, "stack"))
			*at = ' ';
		else if (*at < ' ' || *at == '"')
			*at = *at == '\t' ? ' ' : 0;
	printf(", \"%s\": \"%s\"", file, line);
}

/* Which child hung first, and where. */
static void tell_first(int children)
{
	for (int me = 0; me < children; me++)
		if (!told->done[0][me] || !told->done[1][me]) {
			printf(", \"first\": %d, \"done\": %d, \"fork's errno\": %d", me, told->done[0][me], told->refused);
			tell("status", "State:", told->pid[me]);
			tell("syscall", 0, told->pid[me]);
			tell("stack", 0, told->pid[me]);
			for (int at = 0; at < told->deaths && at < DEATHS; at++)
				printf(", \"death %d\": \"process %d, signal %d, address %#lx, code %#lx\"", at, told->death[at].pid,
				       told->death[at].number, told->death[at].at, told->death[at].code);
			tell("maps", 0, getpid());
			return;
		}
}

int main(int count, char **words)
{
	int children = count > 1 ? atoi(words[1]) : 200, pause = count > 2 ? atoi(words[2]) : 2, hung[2] = { -1, -1 }, wrong = 0;
	char wait;
	pid_t parent;

	if (mmap(told, sizeof *told, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != told)
		return 2;
	sigaltstack(&(stack_t){ .ss_sp = told->stack, .ss_size = sizeof told->stack }, 0);
	sigaction(SIGSEGV, &(struct sigaction){ .sa_sigaction = die, .sa_flags = SA_SIGINFO | SA_ONSTACK }, 0);
	sigaction(SIGBUS, &(struct sigaction){ .sa_sigaction = die, .sa_flags = SA_SIGINFO | SA_ONSTACK }, 0);
	parent = getpid();
	/* One that maps nothing of the pool looks on. */
	if (fork()) {
		member(children, pause);
	}
	for (int made = -1, waited = 0; told->made < children && waited < PATIENCE * 10; rest(100)) {
		waited = told->made && made == told->made ? waited + 1 : 0;
		made = told->made;
	}
	printf("{\"made\": %d}\n", told->made);
	fflush(stdout);
	if (told->made == children) {
		while (read(0, &wait, 1) > 0)
			;
		told->rounds = 1;
		hung[0] = hang(0, children);
		told->rounds = 2;
		while (getppid() == parent)
			rest(50);
		hung[1] = hang(1, children);
	}
	for (int me = 0; me < children; me++)
		wrong += told->wrong[me];
	printf("{\"hung\": %d, \"hung_later\": %d, \"wrong\": %d", hung[0], hung[1], wrong);
	tell_first(children);
	printf("}\n");
	fflush(stdout);
	told->over = 1;
	if (told->made < children)
		kill(parent, SIGKILL);
	return 0;
}
