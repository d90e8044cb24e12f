/* Pages of a few contents that all members of a test know, and whether they map the pool. */
#ifndef PAGES_H
#define PAGES_H

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { PAGE_BYTES = 4096, WORDS = PAGE_BYTES / 8, CONTENTS = 16, RUN = 8 };

/* Word `n` of a page with this content; content 0 is zeros. */
static inline uint64_t word(unsigned content, unsigned n)
{
	uint64_t x = ((uint64_t)content << 16 | n) * 0x9e3779b97f4a7c15u;
	return content ? (x ^ x >> 29) | 1 : 0;
}

static inline void fill(char *page, unsigned content)
{
	for (unsigned n = 0; n < WORDS; n++)
		((uint64_t *)page)[n] = word(content, n);
}

static inline int holds(const char *page, unsigned content)
{
	for (unsigned n = 0; n < WORDS; n++)
		if (((const volatile uint64_t *)page)[n] != word(content, n))
			return 0;
	return 1;
}

/* The content of page `n` of an area that was filled. */
static inline unsigned content_of(size_t n)
{
	return 1 + n % CONTENTS;
}

static inline void fail(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	exit(1);
}

/* A new area with all its pages filled. */
static inline char *filled_area(size_t pages)
{
	char *area = mmap(NULL, pages * PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (area == MAP_FAILED)
		fail("mmap");
	for (size_t n = 0; n < pages; n++)
		fill(area + n * PAGE_BYTES, content_of(n));
	return area;
}

/* Pages of an area that do not hold what they were filled with. */
static inline size_t wrong_pages(const char *area, size_t pages)
{
	size_t wrong = 0;

	for (size_t n = 0; n < pages; n++)
		wrong += !holds(area + n * PAGE_BYTES, content_of(n));
	return wrong;
}

/* Pages of an area that map a file: the pool. Reading them first brings them into the page table. */
static inline size_t folded_pages(const char *area, size_t pages)
{
	const uint64_t of_a_file = (uint64_t)1 << 61;
	int pagemap = open("/proc/self/pagemap", O_RDONLY);
	size_t folded = 0;

	if (pagemap < 0)
		fail("/proc/self/pagemap");
	for (size_t n = 0; n < pages; n++) {
		const char *page = area + n * PAGE_BYTES;
		uint64_t entry;

		(void)*(const volatile char *)page;
		if (pread(pagemap, &entry, 8, (uintptr_t)page / PAGE_BYTES * 8) != 8)
			fail("read /proc/self/pagemap");
		folded += (entry & of_a_file) != 0;
	}
	close(pagemap);
	return folded;
}

/* Waits until most of an area is folded; says how much is. Ends the program after three minutes. */
static inline size_t wait_until_folded(const char *area, size_t pages)
{
	for (int tenths = 0; tenths < 1800; tenths++) {
		size_t folded = folded_pages(area, pages);

		if (folded > pages / 4 * 3)
			return folded;
		usleep(100000);
	}
	fprintf(stderr, "not folded within three minutes: %zu of %zu pages are\n", folded_pages(area, pages), pages);
	exit(1);
}

/* Discards runs of 8 pages and leaves runs of 8 pages, in turn; 0, or the error of the first that fails. */
static inline int discard_runs(char *area, size_t pages, int (*discard)(char *, size_t))
{
	for (size_t n = 0; n < pages; n += 2 * RUN)
		if (discard(area + n * PAGE_BYTES, RUN * PAGE_BYTES))
			return errno;
	return 0;
}

/* Pages that are wrong when discarded runs must hold zeros and the others what they were filled with. */
static inline size_t wrong_after_discard(const char *area, size_t pages)
{
	size_t wrong = 0;

	for (size_t n = 0; n < pages; n++)
		wrong += !holds(area + n * PAGE_BYTES, n / RUN % 2 ? content_of(n) : 0);
	return wrong;
}

#endif
