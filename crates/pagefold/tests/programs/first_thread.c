/*
 * Its first thread ends when it is told to, and another one goes on. "end" ends the first thread, "change" gives every fourth page
 * another content, "check" says "ok", or how many pages are wrong.
 */
#include "pages.h"
#include <pthread.h>

enum { PAGES = 2048, EACH = 4 };

static char *area;
static unsigned changes[PAGES];
static int ends[2];

/* Ends the first thread, and waits until it has ended. */
static void end_first(void)
{
	char text[512] = "";

	if (write(ends[1], "", 1) != 1)
		fail("write");
	while (!strstr(text, ") Z ")) {
		FILE *stat = fopen("/proc/self/stat", "r");

		if (!stat || !fgets(text, sizeof text, stat))
			fail("/proc/self/stat");
		fclose(stat);
	}
}

static size_t wrong(void)
{
	size_t wrong = 0;

	for (size_t n = 0; n < PAGES; n++)
		wrong += !holds(area + n * PAGE_BYTES, content_of(n + changes[n]));
	return wrong;
}

static void *obey(void *unused)
{
	char line[64];

	while (fgets(line, sizeof line, stdin)) {
		size_t found = 0;

		if (line[0] == 'e')
			end_first();
		for (size_t n = 0; line[1] == 'h' && line[2] == 'a' && n < PAGES; n += EACH)
			fill(area + n * PAGE_BYTES, content_of(n + ++changes[n]));
		if (line[1] == 'h' && line[2] == 'e')
			found = wrong();
		found ? printf("%zu pages are wrong\n", found) : puts("ok");
		fflush(stdout);
	}
	exit(0);
	return unused;
}

int main(void)
{
	pthread_t other;
	char end;

	setvbuf(stdin, NULL, _IONBF, 0);
	area = filled_area(PAGES);
	if (pipe(ends) || pthread_create(&other, NULL, obey, NULL))
		fail("start a thread");
	if (read(ends[0], &end, 1) != 1)
		fail("read");
	pthread_exit(NULL);
}
