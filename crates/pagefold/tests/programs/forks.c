/*
 * Two threads allocate and free all the time while a third forks children, which allocate too. Prints one line of
 * JSON.
 */
#include "pages.h"
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>

enum { CHILDREN = 2000, SECONDS = 10, CHILD_SECONDS = 5, MOST_BYTES = 3 << 20 };

static atomic_int is_over;
static atomic_ulong allocations;

/* Allocates, writes and checks the first and the last byte of each page, and frees. */
static void allocate(unsigned *seed)
{
	size_t bytes = 1 + rand_r(seed) % MOST_BYTES;
	char *memory = malloc(bytes), mark = 1 + rand_r(seed) % 100;

	if (!memory)
		fail("malloc");
	for (size_t at = 0; at < bytes; at += PAGE_BYTES)
		memory[at] = mark;
	for (size_t at = 0; at < bytes; at += PAGE_BYTES)
		if (memory[at] != mark)
			_exit(3);
	free(memory);
}

static void *allocate_until_over(void *seed)
{
	for (; !is_over; allocations++)
		allocate(seed);
	return NULL;
}

/* 0 if the child ended well, 1 if it did not, 2 if it did not end in time. */
static int wait_for(int child)
{
	int status;

	for (int ms = 0; ms < CHILD_SECONDS * 1000; ms++) {
		if (waitpid(child, &status, WNOHANG) == child)
			return status != 0;
		usleep(1000);
	}
	kill(child, SIGKILL);
	waitpid(child, &status, 0);
	return 2;
}

int main(void)
{
	unsigned seeds[3] = { 1, 2, 3 }, ended[3] = { 0 };
	time_t end = time(NULL) + SECONDS;
	pthread_t threads[2];

	/* Otherwise the C library learns to keep what is freed, and asks the kernel ever more seldom. */
	mallopt(M_MMAP_THRESHOLD, MOST_BYTES / 3);
	for (int i = 0; i < 2; i++)
		if (pthread_create(&threads[i], NULL, allocate_until_over, &seeds[i]))
			fail("pthread_create");
	for (int n = 0; n < CHILDREN && time(NULL) < end; n++) {
		int child = fork();

		if (child < 0)
			fail("fork");
		if (!child) {
			for (int times = 0; times < 3; times++)
				allocate(&seeds[2]);
			_exit(0);
		}
		ended[wait_for(child)]++;
		rand_r(&seeds[2]);
		if (n < 10 || n % 100 == 99)
			fprintf(stderr, "%d children\n", n + 1);
	}
	is_over = 1;
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	printf("{\"allocations\": %lu, \"well\": %u, \"failed\": %u, \"hung\": %u}\n", allocations, ended[0], ended[1],
	       ended[2]);
	return ended[1] || ended[2];
}
