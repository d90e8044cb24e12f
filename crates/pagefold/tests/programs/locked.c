/*
 * Locks memory that is folded. "all" locks everything, "future" all that comes later, "page" one page. "check" says "ok", or what is wrong
 * with its pages, its locks or mremap.
 */
#include "pages.h"

enum { PAGES = 2048, SMALL = 4 };

static char *area, *small;

static const char *check(void)
{
	char *at = mremap(small, SMALL * PAGE_BYTES, 2 * SMALL * PAGE_BYTES, MREMAP_MAYMOVE);

	if (at == MAP_FAILED || (small = mremap(at, 2 * SMALL * PAGE_BYTES, SMALL * PAGE_BYTES, 0)) != at)
		return "mremap fails";
	return wrong_pages(area, PAGES) ? "pages have changed" : "ok";
}

int main(void)
{
	char line[64];

	setvbuf(stdin, NULL, _IONBF, 0);
	area = filled_area(PAGES);
	small = filled_area(SMALL);
	while (fgets(line, sizeof line, stdin)) {
		const char *said = "ok";

		if (line[0] == 'a' && mlockall(MCL_CURRENT))
			said = "mlockall fails";
		/* Nothing that is there stays locked. */
		else if (line[0] == 'f' && (mlockall(MCL_CURRENT | MCL_FUTURE) || munlock(area, PAGES * PAGE_BYTES)))
			said = "mlockall fails";
		else if (line[0] == 'p' && mlock(area + PAGES / 2 * PAGE_BYTES, PAGE_BYTES))
			said = "mlock fails";
		else if (line[0] == 'c')
			said = check();
		puts(said);
		fflush(stdout);
	}
	return 0;
}
