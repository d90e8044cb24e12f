/*
 * A server that forks its workers: a thread allocates all the time, while others are forked that fill memory with the
 * same. They check and change it, again and again, until the standard input ends. Each worker forks once more, to a child
 * that finds the same memory. Prints one line of JSON.
 *
 * prefork WORKERS MIB [before] [nobody]: with "before", the workers' memory is the parent's, mapped before the fork. With
 * "nobody", workers give up the rights of root.
 */
#include "pages.h"
#include <pthread.h>
#include <grp.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum { MOST = 64, WRITTEN = 4 };

struct told {
	atomic_int is_over, filled;
	atomic_ulong checks, wrong, grandchildren;
};

static atomic_int is_over;

static void *allocate_until_over(void *unused)
{
	while (!is_over) {
		char *memory = malloc(3 << 20);

		for (int at = 0; memory && at < 3 << 20; at += PAGE_BYTES)
			memory[at] = 1;
		free(memory);
		usleep(100);
	}
	return unused;
}

/* Word of a page: the same in all workers, and never 0. A page that was written has another one, by worker and round. */
static unsigned long value(size_t page, unsigned long version)
{
	return (page + 1) * 0x9e3779b97f4a7c15 ^ (version << 8 | 1);
}

static unsigned long wrong_of(unsigned long *memory, size_t pages, const unsigned char *versions)
{
	const size_t words = PAGE_BYTES / sizeof(*memory);
	unsigned long wrong = 0;

	for (size_t page = 0; page < pages; page++) {
		int is_wrong = 0;

		for (size_t at = 0; at < words; at++)
			is_wrong |= memory[page * words + at] != value(page, versions[page]) + at;
		wrong += is_wrong;
	}
	return wrong;
}

static void write_page(unsigned long *memory, size_t page, unsigned char *versions, unsigned char version)
{
	const size_t words = PAGE_BYTES / sizeof(*memory);

	versions[page] = version;
	for (size_t at = 0; at < words; at++)
		memory[page * words + at] = value(page, version) + at;
}

static void work(struct told *told, unsigned long *memory, size_t pages, unsigned seed)
{
	unsigned char *versions = calloc(pages, 1);

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (size_t page = 0; page < pages; page++)
		write_page(memory, page, versions, 0);
	told->filled++;
	for (unsigned turn = 0; !told->is_over; turn++) {
		/* Most of the time nothing happens, so that pages rest. */
		for (int ms = 0; ms < 2000 && !told->is_over; ms += 10)
			usleep(10000);
		told->wrong += wrong_of(memory, pages, versions);
		told->checks++;
		for (int i = 0; i < WRITTEN; i++)
			write_page(memory, rand_r(&seed) % pages, versions, seed % 255 + 1);
		for (int i = 0; i < WRITTEN; i++) {
			/* As they were in the beginning: they can be folded again. */
			size_t page = rand_r(&seed) % pages;

			write_page(memory, page, versions, 0);
		}
		if (turn % 4 == 3) {
			int child = fork();

			if (!child) {
				told->wrong += wrong_of(memory, pages, versions);
				for (int i = 0; i < WRITTEN; i++)
					write_page(memory, rand_r(&seed) % pages, versions, 7);
				told->wrong += wrong_of(memory, pages, versions);
				told->grandchildren++;
				_exit(0);
			}
			waitpid(child, NULL, 0);
		}
	}
	_exit(0);
}

static int has_word(char **words, const char *wanted)
{
	while (*words && strcmp(*words, wanted))
		words++;
	return *words != NULL;
}

int main(int count, char **words)
{
	int workers = count > 1 ? atoi(words[1]) : 4, status, failed = 0;
	int is_before = has_word(words, "before"), is_nobody = has_word(words, "nobody");
	size_t bytes = (count > 2 ? atol(words[2]) : 40) << 20;
	struct told *told = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	unsigned long *memory = NULL;
	pthread_t thread;
	char byte;

	if (told == MAP_FAILED || workers > MOST || pthread_create(&thread, NULL, allocate_until_over, NULL))
		fail("begin");
	if (is_before)
		memory = malloc(bytes);
	for (int n = 0; n < workers; n++) {
		int child = fork();

		if (child < 0)
			fail("fork");
		if (!child) {
			is_over = 1;
			if (is_nobody && (setgroups(0, NULL) || setgid(65534) || setuid(65534)))
				_exit(1);
			work(told, is_before ? memory : malloc(bytes), bytes / PAGE_BYTES - 1, n + 1);
		}
	}
	while (told->filled < workers)
		usleep(10000);
	fprintf(stderr, "filled\n");
	while (read(0, &byte, 1) > 0)
		;
	told->is_over = is_over = 1;
	for (int n = 0; n < workers; n++) {
		wait(&status);
		failed += status != 0;
	}
	printf("{\"workers\": %d, \"failed\": %d, \"checks\": %lu, \"wrong\": %lu, \"grandchildren\": %lu}\n", workers, failed,
	       told->checks, told->wrong, told->grandchildren);
	return failed || told->wrong;
}
