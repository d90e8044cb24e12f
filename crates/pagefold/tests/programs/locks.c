/* Locks all of its memory after it was folded, and what it allocates after that. Prints one line of JSON. */
#include "pages.h"

enum { PAGES = 2048, MORE_PAGES = 512 };

static double seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec + now.tv_nsec / 1e9;
}

static void say(const char *what, double since)
{
	fprintf(stderr, "%s after %.3f s\n", what, seconds() - since);
}

int main(void)
{
	char *area = filled_area(PAGES);
	size_t folded = wait_until_folded(area, PAGES);
	double begin = seconds();

	printf("{\"folded_pages\": %zu}\n", folded);
	fflush(stdout);
	if (mlockall(MCL_CURRENT))
		fail("mlockall of what there is");
	say("what there is was locked", begin);
	size_t wrong = wrong_pages(area, PAGES);

	if (munlockall())
		fail("munlockall");
	if (mlockall(MCL_CURRENT | MCL_FUTURE))
		fail("mlockall of what there is and will be");
	say("what there will be was locked", begin);
	char *more = filled_area(MORE_PAGES), *heap = malloc(MORE_PAGES * PAGE_BYTES);

	if (!heap)
		fail("malloc");
	memset(heap, 7, MORE_PAGES * PAGE_BYTES);
	/* Time for the agent to look at what is new. */
	sleep(3);
	wrong += wrong_pages(area, PAGES) + wrong_pages(more, MORE_PAGES);
	for (size_t n = 0; n < MORE_PAGES * PAGE_BYTES; n++)
		wrong += heap[n] != 7;
	free(heap);
	printf("{\"folded_pages\": %zu, \"wrong_pages\": %zu, \"seconds\": %.3f}\n", folded, wrong, seconds() - begin);
	return 0;
}
