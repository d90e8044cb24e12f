/* Changes mappings of folded memory by system calls of its own, past the C library, while nothing of it is just being folded.
 * Says how much was folded, and waits for the end of its input while it is unfolded and folded again. Prints one line of JSON:
 * pages that are wrong right after the change, and later. "refill" is the other member, whose new contents take the slots that
 * others give back. */
#include "pages.h"
#include <sys/syscall.h>

enum { PAGES = 1024, FROM = 256, CHANGED = 512 };

/* A system call, by an instruction of our own. */
static long raw(long number, long a, long b, long c, long d, long e, long f)
{
	register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
	long answer = number;

	__asm__ volatile("syscall" : "+a"(answer) : "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
	return answer;
}

static void must(const char *what, long answer)
{
	if (answer >= -4095 && answer < 0) {
		errno = -answer;
		fail(what);
	}
}

/* What is changed: CHANGED pages that were folded, and for some ways another place. */
struct memory { char *area, *part, *elsewhere; int file, is_late; };

/* Content of page `n` of the file, which no area has. */
static unsigned of_file(size_t n) { return 5000 + n; }

static void unmap(struct memory *m)
{
	must("munmap", raw(SYS_munmap, (long)m->part, CHANGED * PAGE_BYTES, 0, 0, 0, 0));
	must("mmap", raw(SYS_mmap, (long)m->part, CHANGED * PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED_NOREPLACE, m->file, 0));
}

static void map_over(struct memory *m)
{
	must("mmap", raw(SYS_mmap, (long)m->part, CHANGED * PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, m->file, 0));
}

static size_t wrong_of_file(struct memory *m)
{
	size_t wrong = 0;

	for (size_t n = 0; n < CHANGED; n++)
		wrong += !holds(m->part + n * PAGE_BYTES, of_file(n));
	/* Later, when the agent has looked at it. Discarded, it is the file's again. By the C library: the agent must not take it for what it was. */
	if (m->is_late && madvise(m->part, CHANGED * PAGE_BYTES, MADV_DONTNEED))
		fail("madvise of the file's mapping");
	for (size_t n = 0; n < CHANGED; n++)
		wrong += !holds(m->part + n * PAGE_BYTES, of_file(n));
	return wrong;
}

static void protect(struct memory *m)
{
	must("mprotect", raw(SYS_mprotect, (long)m->part, CHANGED * PAGE_BYTES, PROT_READ, 0, 0, 0));
}

/* Pages that can be written, or do not hold what they did. */
static size_t wrong_of_protected(struct memory *m)
{
	size_t wrong = 0;
	int zero = open("/dev/zero", O_RDONLY);

	for (size_t n = 0; n < CHANGED; n++) {
		wrong += read(zero, m->part + n * PAGE_BYTES, 1) != -1 || errno != EFAULT;
		wrong += !holds(m->part + n * PAGE_BYTES, content_of(FROM + n));
	}
	close(zero);
	return wrong;
}

static void lock(struct memory *m)
{
	must("mlock", raw(SYS_mlock, (long)m->part, CHANGED * PAGE_BYTES, 0, 0, 0, 0));
}

/* Pages that are not locked: those that the kernel lets go cold. */
static size_t wrong_of_locked(struct memory *m)
{
	size_t wrong = 0;

	for (size_t n = 0; n < CHANGED; n++) {
		wrong += raw(SYS_madvise, (long)m->part + n * PAGE_BYTES, PAGE_BYTES, MADV_COLD, 0, 0, 0) != -EINVAL;
		wrong += !holds(m->part + n * PAGE_BYTES, content_of(FROM + n));
	}
	return wrong;
}

static void move_all(struct memory *m, long flags)
{
	for (size_t n = 0; n < CHANGED; n++)
		must("mremap", raw(SYS_mremap, (long)m->part + n * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES, MREMAP_MAYMOVE | MREMAP_FIXED | flags,
				   (long)m->elsewhere + n * PAGE_BYTES, 0));
}

static void move(struct memory *m) { move_all(m, 0); }

static void leave(struct memory *m) { move_all(m, MREMAP_DONTUNMAP); }

static size_t wrong_of_moved(struct memory *m)
{
	size_t wrong = 0;

	for (size_t n = 0; n < CHANGED; n++)
		wrong += !holds(m->elsewhere + n * PAGE_BYTES, content_of(FROM + n));
	return wrong;
}

static size_t wrong_of_left(struct memory *m)
{
	size_t wrong = wrong_of_moved(m);

	for (size_t n = 0; n < CHANGED; n++)
		wrong += !holds(m->part + n * PAGE_BYTES, 0);
	return wrong;
}

static const struct way {
	const char *name;
	void (*change)(struct memory *);
	size_t (*wrong)(struct memory *);
} WAYS[] = {
	{ "unmap", unmap, wrong_of_file }, { "map_over", map_over, wrong_of_file }, { "protect", protect, wrong_of_protected },
	{ "lock", lock, wrong_of_locked }, { "move", move, wrong_of_moved }, { "leave", leave, wrong_of_left },
};

static void refill(void)
{
	char *area = filled_area(PAGES);

	for (unsigned round = 1;; round++) {
		for (size_t n = 0; n < PAGES; n++)
			fill(area + n * PAGE_BYTES, round * 100 + n / 4);
		sleep(2);
	}
}

/* Waits until no more of an area was folded for two seconds: nothing of it is to be just being folded, which is the moment that cannot
 * be told. Says how much is folded. Ends the program after a minute. */
static size_t wait_until_folding_rests(const char *area)
{
	size_t before = wait_until_folded(area, PAGES);

	for (int times = 0; times < 30; times++) {
		sleep(2);
		size_t folded = folded_pages(area, PAGES);

		if (folded == before)
			return folded;
		before = folded;
	}
	fprintf(stderr, "ever more is folded\n");
	exit(1);
}

static int file_of_contents(void)
{
	static char page[PAGE_BYTES];
	int file = memfd_create("contents", 0);

	for (size_t n = 0; n < CHANGED; n++) {
		fill(page, of_file(n));
		if (write(file, page, PAGE_BYTES) != PAGE_BYTES)
			fail("write");
	}
	return file;
}

static void wait_for_end_of_input(void)
{
	char byte;
	ssize_t count;

	do
		count = read(0, &byte, 1);
	while (count > 0 || (count < 0 && errno == EINTR));
}

int main(int argc, char **argv)
{
	const struct way *way = NULL;

	for (size_t n = 0; n < sizeof WAYS / sizeof *WAYS; n++)
		if (argc == 2 && !strcmp(argv[1], WAYS[n].name))
			way = &WAYS[n];
	if (!way)
		refill();
	struct memory m = { .area = filled_area(PAGES), .file = file_of_contents() };

	m.part = m.area + FROM * PAGE_BYTES;
	m.elsewhere = mmap(NULL, CHANGED * PAGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	size_t folded = wait_until_folding_rests(m.area);

	way->change(&m);
	size_t wrong = way->wrong(&m);

	printf("{\"folded_pages\": %zu, \"wrong_pages\": %zu}\n", folded, wrong);
	fflush(stdout);
	wait_for_end_of_input();
	m.is_late = 1;
	size_t later = way->wrong(&m);
	/* What was not changed. */
	size_t others = wrong_pages(m.area, FROM);

	printf("{\"way\": \"%s\", \"wrong_pages\": %zu, \"wrong_pages_later\": %zu, \"wrong_others\": %zu}\n", way->name, wrong, later, others);
	return 0;
}
