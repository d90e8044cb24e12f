/*
 * Makes a process that shares its memory (`CLONE_VM`) when it hears a line, which writes and discards pages by itself until the next line.
 * Nobody stops that process. Says how many rounds it has made, and how many pages were wrong. With an argument, that process never rests.
 */
#include "pages.h"
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>

enum { PAGES = 2048, STACK_BYTES = 1 << 20, LAST = WORDS - 1 };

static volatile int is_over, never_rests;
static volatile unsigned long rounds, wrong;
static char *area;

/* Writes a word of a page, discards the page, or gives it its content again. Looks at what was there before. */
static int shares(void *unused)
{
	static uint64_t written[PAGES];
	unsigned seed = 1;

	while (!is_over) {
		size_t n = rand_r(&seed) % PAGES;
		volatile uint64_t *page = (void *)(area + n * PAGE_BYTES);

		wrong += page[0] != word(content_of(n), 0);
		wrong += page[LAST] != (written[n] ? written[n] : word(content_of(n), LAST));
		switch (rand_r(&seed) % 4) {
		case 0:
			page[LAST] = written[n] = ++rounds << 1 | 1;
			break;
		case 1:
			/* Nobody but this process touches it meanwhile. */
			if (madvise((void *)page, PAGE_BYTES, MADV_DONTNEED))
				wrong++;
			wrong += page[0] || page[LAST];
			/* Fall through. */
		default:
			fill((char *)page, content_of(n));
			written[n] = 0;
		}
		/* Most of the time nothing happens, so that pages rest. */
		if (++rounds % 8 == 0 && !never_rests)
			usleep(2000);
	}
	return 0;
}

int main(int count, char **arguments)
{
	char line[16], *stack = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int child;

	never_rests = count > 1 && arguments[1];
	area = filled_area(PAGES);
	puts("filled");
	fflush(stdout);
	if (!fgets(line, sizeof line, stdin))
		return 1;
	child = clone(shares, stack + STACK_BYTES, CLONE_VM | SIGCHLD, NULL);
	if (child < 0)
		fail("clone");
	printf("%d\n", child);
	fflush(stdout);
	if (!fgets(line, sizeof line, stdin))
		return 1;
	is_over = 1;
	waitpid(child, NULL, 0);
	printf("%lu %lu\n", rounds, wrong);
	fflush(stdout);
	/* It is detached now, or ended. */
	fgets(line, sizeof line, stdin);
	return 0;
}
