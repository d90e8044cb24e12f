/*
 * Moves and enlarges memory that is folded, through the C library. "move" has it do so in all ways, and "fork" has a forked child go
 * on in its place; the answer is "ok", or what is wrong. Other threads call mremap all the while, and take signals.
 */
#include "pages.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/time.h>
#include <sys/wait.h>

enum { PAGES = 1024, SMALL = 4, THREADS = 3 };

static _Atomic(const char *) wrong;
static _Atomic unsigned long calls, signals, refused;

static void check(int holds, const char *what)
{
	if (!holds && !wrong) {
		fprintf(stderr, "%s (errno %d)\n", what, errno);
		wrong = what;
	}
}

static void take(int number)
{
	(void)number;
	signals++;
}

static char *map(void *at, size_t pages, int access, int flags)
{
	return mmap(at, pages * PAGE_BYTES, access, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

/* Has the same pages moved to and fro, which nobody folds for long. */
static void *move_small(void *seed)
{
	char *area = map(NULL, SMALL, PROT_READ | PROT_WRITE, 0);
	size_t pages = SMALL;
	uint64_t next = (uintptr_t)seed;

	memset(area, 7, SMALL * PAGE_BYTES);
	for (;;) {
		char *at;

		next = next * 6364136223846793005u + 1442695040888963407u;
		size_t wanted = SMALL + (next >> 33) % 12;
		at = mremap(area, pages * PAGE_BYTES, wanted * PAGE_BYTES, MREMAP_MAYMOVE);
		/* Left behind in several mappings, it cannot be moved. */
		if (at == MAP_FAILED && errno == EFAULT) {
			refused++;
			munmap(area, pages * PAGE_BYTES);
			area = map(NULL, SMALL, PROT_READ | PROT_WRITE, 0);
			memset(area, 7, SMALL * PAGE_BYTES);
			pages = SMALL;
			continue;
		}
		check(at != MAP_FAILED, "a small area could not be moved");
		if (at == MAP_FAILED)
			return NULL;
		area = at;
		pages = wanted;
		for (size_t n = 0; n < SMALL * PAGE_BYTES; n += 512)
			check(area[n] == 7, "a small area has lost its bytes");
		for (size_t n = SMALL; n < pages; n++)
			check(area[n * PAGE_BYTES] == 0, "a small area has grown by pages that are not zero");
		calls++;
		/* Blocks most times: agents can come and go, and other programs have processors. */
		if (next >> 62 != 0)
			usleep(1000);
	}
}

static size_t not_zero(const char *area, size_t pages)
{
	size_t found = 0;

	for (size_t n = 0; n < pages; n++)
		found += !holds(area + n * PAGE_BYTES, 0);
	return found;
}

static void fill_all(char *area, size_t from, size_t to)
{
	for (size_t n = from; n < to; n++)
		fill(area + n * PAGE_BYTES, content_of(n));
}

/* Room for an area that can grow in place. */
static char *room(size_t pages)
{
	char *at = map(NULL, pages, PROT_NONE, 0);

	if (at == MAP_FAILED)
		fail("mmap");
	munmap(at, pages * PAGE_BYTES);
	return at;
}

static void move_all(void)
{
	const size_t bytes = (size_t)PAGES * PAGE_BYTES;
	char *area = map(room(4 * PAGES), PAGES, PROT_READ | PROT_WRITE, MAP_FIXED), *at, *block;

	fill_all(area, 0, PAGES);
	block = malloc(bytes);
	fill_all((char *)(((uintptr_t)block + 4095) / PAGE_BYTES * PAGE_BYTES), 0, PAGES - 1);
	wait_until_folded(area, PAGES);

	at = mremap(area, bytes, 2 * bytes, 0);
	check(at == area, "it has not grown in place");
	check(wrong_pages(area, PAGES) == 0, "growing in place has changed pages");
	check(at == MAP_FAILED || not_zero(area + bytes, PAGES) == 0, "pages that are new in place are not zero");

	at = mremap(area, bytes, bytes / 2, 0);
	check(at == area, "it has not shrunk");
	munmap(area + bytes, bytes);
	at = mremap(area, bytes / 2, bytes, 0);
	check(at == area, "it has not grown again");
	check(at == MAP_FAILED || wrong_pages(area, PAGES / 2) == 0, "growing again has changed pages");
	check(at == MAP_FAILED || not_zero(area + bytes / 2, PAGES / 2) == 0, "pages that came again are not zero");
	if (wrong)
		return;

	fill_all(area, PAGES / 2, PAGES);
	wait_until_folded(area, PAGES);
	at = map(area + bytes, 1, PROT_READ, MAP_FIXED);
	check(mremap(area, bytes, 2 * bytes, 0) == MAP_FAILED && errno == ENOMEM, "it has grown over its neighbour");
	area = mremap(area, bytes, 2 * bytes, MREMAP_MAYMOVE);
	check(area != MAP_FAILED, "it was not moved");
	if (wrong)
		return;
	check(wrong_pages(area, PAGES) == 0, "a move has changed pages");
	check(not_zero(area + bytes, PAGES) == 0, "pages that are new behind the moved ones are not zero");
	munmap(area + bytes, bytes);
	munmap(at, PAGE_BYTES);

	wait_until_folded(area, PAGES);
	at = mremap(area, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, room(PAGES));
	check(at != MAP_FAILED, "it was not moved to a given place");
	if (wrong)
		return;
	check(wrong_pages(at, PAGES) == 0, "a move to a given place has changed pages");
	area = at;

	wait_until_folded(area, PAGES);
	at = mremap(area, bytes, bytes, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
	check(at != MAP_FAILED && at != area, "it was not moved away from what stays");
	if (wrong)
		return;
	check(wrong_pages(at, PAGES) == 0, "a move away from what stays has changed pages");
	check(not_zero(area, PAGES) == 0, "what stays is not zero");
	munmap(area, bytes);
	area = at;

	wait_until_folded(area, PAGES);
	errno = 0;
	check(mremap(area + 5, bytes, bytes, MREMAP_MAYMOVE) == MAP_FAILED && errno == EINVAL, "an odd place was taken");
	munmap(area + bytes / 2, PAGE_BYTES);
	errno = 0;
	check(mremap(area, bytes, 2 * bytes, MREMAP_MAYMOVE) == MAP_FAILED && errno == EFAULT, "a gap was moved");
	check(wrong_pages(area, PAGES / 2) == 0, "refused calls have changed pages");
	munmap(area, bytes);

	block = realloc(block, 2 * bytes);
	check(block != NULL, "realloc fails");
	/* Large blocks begin at the same place in a page. */
	at = (char *)(((uintptr_t)block + 4095) / PAGE_BYTES * PAGE_BYTES);
	check(wrong_pages(at, PAGES - 1) == 0, "realloc has changed bytes");
	free(block);
}

static void start_threads(void)
{
	struct itimerval often = { { 0, 1000 }, { 0, 1000 } };
	sigset_t alarms;

	sigemptyset(&alarms);
	sigaddset(&alarms, SIGALRM);
	pthread_sigmask(SIG_UNBLOCK, &alarms, NULL);
	for (uintptr_t n = 0; n < THREADS; n++) {
		pthread_t thread;

		if (pthread_create(&thread, NULL, move_small, (void *)(n + 1)))
			fail("pthread_create");
	}
	pthread_sigmask(SIG_BLOCK, &alarms, NULL);
	setitimer(ITIMER_REAL, &often, NULL);
}

/* Goes on in a child, for which the parent waits. */
static void go_on_in_child(void)
{
	pid_t child = fork();

	if (child < 0)
		fail("fork");
	if (child > 0) {
		waitpid(child, NULL, 0);
		exit(0);
	}
	start_threads();
}

int main(void)
{
	char line[64];

	setvbuf(stdin, NULL, _IONBF, 0);
	signal(SIGALRM, take);
	start_threads();
	while (fgets(line, sizeof line, stdin)) {
		unsigned long before = calls, taken = signals;

		if (line[0] == 'm') {
			/* The agent is there. */
			unsigned long seen = refused;

			move_all();
			check(refused == seen, "a small area was refused");
		} else if (line[0] == 'f')
			go_on_in_child();
		/* On a busy machine, the others may not get a processor at once. */
		for (int tenths = 0; tenths < 100 && (!tenths || calls == before || signals == taken); tenths++)
			usleep(100000);
		check(calls > before && signals > taken, "the other threads stand still");
		printf("%s\n", wrong ? wrong : "ok");
		fflush(stdout);
	}
	return 0;
}
