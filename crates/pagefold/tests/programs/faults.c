/* Has a userfaultfd of its own on folded memory. Moves pages from and to such memory (UFFDIO_MOVE), and wants to be told of
 * pages that are missing there. Prints one line of JSON. */
#include "pages.h"
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

enum { PAGES = 1024, AT_ONCE = 96, WRITTEN = 5, ANSWER = 4000 };

#ifndef UFFDIO_MOVE
struct uffdio_move { uint64_t dst, src, len, mode; int64_t move; };
#define UFFDIO_MOVE _IOWR(UFFDIO, 5, struct uffdio_move)
#endif

static int faults;
static size_t told;

static void open_faults(void)
{
	struct uffdio_api api = { .api = UFFD_API };

	faults = syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
	if (faults < 0 || ioctl(faults, UFFDIO_API, &api))
		fail("userfaultfd");
}

static void watch(char *area, size_t pages)
{
	struct uffdio_register request = { .range = { (uintptr_t)area, pages * PAGE_BYTES }, .mode = UFFDIO_REGISTER_MODE_MISSING };

	if (ioctl(faults, UFFDIO_REGISTER, &request))
		fail("UFFDIO_REGISTER");
}

static void discard(char *area, size_t pages)
{
	if (madvise(area, pages * PAGE_BYTES, MADV_DONTNEED))
		fail("madvise");
}

/* Content of page `n` of the first area, after some were written. */
static unsigned moved_content(size_t n) { return n % WRITTEN ? content_of(n) : 3000 + n; }

/* Answers each missing page with a content of its own. */
static void *answer(void *area)
{
	static char page[PAGE_BYTES] __attribute__((aligned(PAGE_BYTES)));
	struct uffd_msg message;

	while (read(faults, &message, sizeof message) == sizeof message) {
		char *at = (char *)(message.arg.pagefault.address & -PAGE_BYTES);
		struct uffdio_copy copy = { .dst = (uintptr_t)at, .src = (uintptr_t)page, .len = PAGE_BYTES };

		fill(page, ANSWER + (at - (char *)area) / PAGE_BYTES);
		told++;
		if (ioctl(faults, UFFDIO_COPY, &copy))
			fail("UFFDIO_COPY");
	}
	return NULL;
}

int main(void)
{
	char *from = filled_area(PAGES), *to = filled_area(PAGES), *missing = filled_area(PAGES);
	size_t folded = wait_until_folded(from, PAGES), wrong_moved = 0, wrong_left = 0, wrong_missing = 0;
	pthread_t thread;

	wait_until_folded(to, PAGES);
	wait_until_folded(missing, PAGES);
	/* Some are broken. */
	for (size_t n = 0; n < PAGES; n += WRITTEN)
		fill(from + n * PAGE_BYTES, moved_content(n));
	open_faults();
	watch(to, PAGES);
	discard(to, PAGES);
	for (size_t n = 0; n < PAGES; n += AT_ONCE) {
		size_t bytes = (PAGES - n < AT_ONCE ? PAGES - n : AT_ONCE) * PAGE_BYTES, at = n * PAGE_BYTES;
		struct uffdio_move move = { .dst = (uintptr_t)to + at, .src = (uintptr_t)from + at, .len = bytes };

		if (ioctl(faults, UFFDIO_MOVE, &move) || (size_t)move.move != bytes)
			fail("UFFDIO_MOVE");
	}
	for (size_t n = 0; n < PAGES; n++) {
		wrong_moved += !holds(to + n * PAGE_BYTES, moved_content(n));
		wrong_left += !holds(from + n * PAGE_BYTES, 0);
	}
	watch(missing, PAGES);
	discard(missing, PAGES);
	if (pthread_create(&thread, NULL, answer, missing))
		fail("pthread_create");
	for (size_t n = 0; n < PAGES; n++)
		wrong_missing += !holds(missing + n * PAGE_BYTES, ANSWER + n);
	printf("{\"folded\": %zu, \"wrong_moved\": %zu, \"wrong_left\": %zu, \"told\": %zu, \"wrong_missing\": %zu}\n",
	       folded, wrong_moved, wrong_left, told, wrong_missing);
	return 0;
}
