/*
 * Reserves eight terabytes, as MariaDB does for its buffers, fills an area, and rests. Prints "ready" before it rests.
 */
#include "pages.h"

enum { PAGES = 16384 };

int main(void)
{
	const size_t reserved = (size_t)8 << 40;

	if (mmap(NULL, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) == MAP_FAILED)
		fail("reserve");
	filled_area(PAGES);
	puts("ready");
	fflush(stdout);
	for (;;)
		pause();
}
