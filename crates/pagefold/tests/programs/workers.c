/*
 * A server that forks its workers when it is told to. It has filled memory by then, which they inherit, and each fills as much
 * of its own. All obey the same orders, which a test writes to a file that they have mapped.
 *
 * workers FILE: the file is a table of words. The first four: the number of the order, the order, how many workers there are,
 * which inherited page is to be touched. From the fifth on, four words a process, the parent first: its pid, the last order that it
 * has carried out, wrong pages, faults of that page. The last four: see below.
 *
 * workers FILE PID: an outsider, which writes some pages that this worker has inherited (`process_vm_writev`), and reads them again.
 * Nobody else writes these.
 */
#include "pages.h"
#include <grp.h>
#include <linux/io_uring.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>

enum { PAGES = 2048, TABLE_BYTES = 4096, HEAD = 4, SLOT = 4, MOST = 16, AT_ONCE = 256, ROUNDS = 40, RING_BYTES = 1 << 15 };
/* Pages that a device holds, that change their protection, that get advice of each kind. */
enum { LATE = 8, PROTECTED = 512, ADVISED = 256 };
enum { NUMBER, ORDER, WORKERS, TOUCHED };
enum { PID, DONE, WRONG, FAULTS };
/* The address that all have inherited memory at, in two words; pages that outsiders have written, and found wrong. */
enum { ADDRESS = 1020, WRITTEN = 1022, LOST = 1023 };

/* Both areas of a process, and which content each of their pages has to have. */
struct areas {
	char *pages[2];
	unsigned char contents[2][PAGES];
};

static volatile uint32_t *table;
static struct areas areas;

/* Whether a page of the inherited area is an outsider's. None of these is ever discarded. */
static int is_outsiders(int which, size_t n)
{
	return which == 0 && n / RUN % 5 == 3 && n % 4 == 0;
}

static void take_area(int which)
{
	areas.pages[which] = filled_area(PAGES);
	for (size_t n = 0; n < PAGES; n++)
		areas.contents[which][n] = content_of(n);
}

static void write_pages(unsigned content)
{
	for (int which = 0; which < 2; which++)
		for (size_t n = content % 7; areas.pages[which] && n < PAGES; n += 7) {
			if (is_outsiders(which, n))
				continue;
			fill(areas.pages[which] + n * PAGE_BYTES, content);
			areas.contents[which][n] = content;
		}
}

static void discard_pages(void)
{
	for (int which = 0; which < 2; which++)
		for (size_t n = 0; areas.pages[which] && n < PAGES; n += 5 * RUN) {
			if (madvise(areas.pages[which] + n * PAGE_BYTES, RUN * PAGE_BYTES, MADV_DONTNEED))
				fail("madvise");
			memset(areas.contents[which] + n, 0, RUN);
		}
}

/* Discards half of the inherited pages one by one, and touches none of them. */
static void discard_one_by_one(void)
{
	for (size_t n = 0; n < PAGES; n++) {
		if (n % 2 || is_outsiders(0, n))
			continue;
		if (madvise(areas.pages[0] + n * PAGE_BYTES, PAGE_BYTES, MADV_DONTNEED))
			fail("madvise");
		areas.contents[0][n] = 0;
	}
}

/* Writes those of the first runs of the inherited area that may be written. From now on, only the others may be. */
static void change_protection(int ends)
{
	static unsigned turn;

	for (size_t n = 0; n < PROTECTED; n += RUN) {
		char *run = areas.pages[0] + n * PAGE_BYTES;
		int is_open = n / RUN % 2 == turn % 2;

		for (size_t page = n; turn && is_open && page < n + RUN; page++) {
			fill(areas.pages[0] + page * PAGE_BYTES, 200 + turn % 50);
			areas.contents[0][page] = 200 + turn % 50;
		}
		if (mprotect(run, RUN * PAGE_BYTES, ends || !is_open ? PROT_READ | PROT_WRITE : PROT_READ))
			fail("mprotect");
	}
	turn = ends ? 0 : turn + 1;
}

/* Gives advice of each kind to as many pages of the inherited area. */
static void give_advice(void)
{
	const int kinds[] = { MADV_DONTFORK, MADV_DONTDUMP, MADV_NOHUGEPAGE, MADV_MERGEABLE };

	/* A kernel that merges no pages does not know the last. */
	for (size_t n = 0; n < 4; n++)
		if (madvise(areas.pages[0] + n * ADVISED * PAGE_BYTES, ADVISED * PAGE_BYTES, kinds[n]) && n < 3)
			fail("madvise");
}

static unsigned wrong(void)
{
	unsigned wrong = 0;

	for (int which = 0; which < 2; which++)
		for (size_t n = 0; areas.pages[which] && n < PAGES; n++)
			wrong += !is_outsiders(which, n) &&
				 !holds(areas.pages[which] + n * PAGE_BYTES, areas.contents[which][n]);
	return wrong;
}

static long faults(void)
{
	struct rusage usage;

	getrusage(RUSAGE_SELF, &usage);
	return usage.ru_minflt + usage.ru_majflt;
}

/* Writes a page that is the process's own already, with what it holds. Says how often that took a fault. */
static unsigned touch_page(size_t n)
{
	volatile uint64_t *page = (void *)(areas.pages[0] + n * PAGE_BYTES);
	const uint64_t first = *page;
	time_t end;
	long before;

	*page = first;
	before = faults();
	for (end = time(NULL) + 3; time(NULL) < end;)
		for (int times = 0; times < 1000; times++)
			*page = first;
	return faults() - before;
}

/* A ring of `io_uring`, without a library. */
static struct {
	int ring, file;
	char *submitted, *completed;
	unsigned *tail, *mask, *places, *done, *seen;
	struct io_uring_sqe *entries;
} uring;

static char *map_ring(off_t part)
{
	char *at = mmap(NULL, RING_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, uring.ring, part);

	if (at == MAP_FAILED)
		fail("mmap of a ring");
	return at;
}

static void open_ring(void)
{
	struct io_uring_params with = { 0 };
	char page[PAGE_BYTES];

	uring.ring = syscall(SYS_io_uring_setup, AT_ONCE, &with);
	uring.file = memfd_create("contents", MFD_CLOEXEC);
	if (uring.ring < 0 || uring.file < 0)
		fail("io_uring_setup, memfd_create");
	for (unsigned content = 0; content <= CONTENTS; content++) {
		fill(page, content);
		if (pwrite(uring.file, page, PAGE_BYTES, content * PAGE_BYTES) != PAGE_BYTES)
			fail("pwrite");
	}
	uring.submitted = map_ring(IORING_OFF_SQ_RING);
	uring.completed = map_ring(IORING_OFF_CQ_RING);
	uring.entries = (void *)map_ring(IORING_OFF_SQES);
	uring.tail = (unsigned *)(uring.submitted + with.sq_off.tail);
	uring.mask = (unsigned *)(uring.submitted + with.sq_off.ring_mask);
	uring.places = (unsigned *)(uring.submitted + with.sq_off.array);
	uring.seen = (unsigned *)(uring.completed + with.cq_off.head);
	uring.done = (unsigned *)(uring.completed + with.cq_off.tail);
}

static void close_ring(void)
{
	munmap(uring.submitted, RING_BYTES);
	munmap(uring.completed, RING_BYTES);
	munmap(uring.entries, RING_BYTES);
	close(uring.ring);
	close(uring.file);
}

/* Has the kernel's own threads read into pages, and perhaps discard others. Nobody else touches them meanwhile. */
static void let_kernel_write(int discards)
{
	static unsigned turn;
	unsigned count = 0;

	turn++;
	for (size_t n = 0; n < PAGES && count < AT_ONCE; n++) {
		struct io_uring_sqe entry = { .flags = IOSQE_ASYNC, .addr = (uintptr_t)areas.pages[0] + n * PAGE_BYTES };
		unsigned content = (n + turn) % (CONTENTS + !!discards) + !discards, place = *uring.tail & *uring.mask;

		if (n / RUN % 5 != 2)
			continue;
		entry.len = PAGE_BYTES;
		if (content) {
			entry.opcode = IORING_OP_READ;
			entry.fd = uring.file;
			entry.off = content * PAGE_BYTES;
		} else {
			entry.opcode = IORING_OP_MADVISE;
			entry.fadvise_advice = MADV_DONTNEED;
		}
		uring.entries[place] = entry;
		uring.places[place] = place;
		__atomic_store_n(uring.tail, *uring.tail + 1, __ATOMIC_RELEASE);
		areas.contents[0][n] = content;
		count++;
	}
	for (unsigned left = count, first = *uring.seen; __atomic_load_n(uring.done, __ATOMIC_ACQUIRE) - first < count;) {
		long taken = syscall(SYS_io_uring_enter, uring.ring, left, 1, IORING_ENTER_GETEVENTS, NULL, 0);

		if (taken < 0 && errno != EINTR && errno != EAGAIN)
			fail("io_uring_enter");
		left -= taken > 0 ? taken : 0;
	}
	__atomic_store_n(uring.seen, *uring.seen + count, __ATOMIC_RELEASE);
}

static int late[2];

/* Begins to read into pages that are registered, from a pipe that is empty yet. The kernel writes to their frames. */
static void begin_late_reads(void)
{
	struct iovec pages[LATE];

	open_ring();
	if (pipe(late))
		fail("pipe");
	for (size_t n = 0; n < LATE; n++)
		pages[n] = (struct iovec){ areas.pages[0] + 3 * n * PAGE_BYTES, PAGE_BYTES };
	if (syscall(SYS_io_uring_register, uring.ring, IORING_REGISTER_BUFFERS, pages, LATE))
		fail("io_uring_register");
	for (unsigned n = 0; n < LATE; n++) {
		uring.entries[n] = (struct io_uring_sqe){ .opcode = IORING_OP_READ_FIXED, .fd = late[0], .len = PAGE_BYTES,
							  .addr = (uintptr_t)pages[n].iov_base, .buf_index = n };
		uring.places[n] = n;
	}
	__atomic_store_n(uring.tail, LATE, __ATOMIC_RELEASE);
	if (syscall(SYS_io_uring_enter, uring.ring, LATE, 0, 0, NULL, 0) != LATE)
		fail("io_uring_enter");
}

static void end_late_reads(void)
{
	char page[PAGE_BYTES];

	fill(page, 99);
	for (size_t n = 0; n < LATE; n++) {
		if (write(late[1], page, PAGE_BYTES) != PAGE_BYTES)
			fail("write");
		areas.contents[0][3 * n] = 99;
	}
	while (__atomic_load_n(uring.done, __ATOMIC_ACQUIRE) != LATE)
		syscall(SYS_io_uring_enter, uring.ring, 0, LATE, IORING_ENTER_GETEVENTS, NULL, 0);
	close(late[0]);
	close(late[1]);
	close_ring();
}

/* Writes pages of another process until that is gone: all the time in a long run, and else 5,000 times a second at most. */
static void write_from_outside(pid_t pid)
{
	static uint64_t last[PAGES];
	int is_long = getenv("PAGEFOLD_SOAK_SECONDS") != NULL;
	char *area = (char *)((uint64_t)table[ADDRESS] << 32 | table[ADDRESS + 1]);

	for (uint64_t number = 1;; number++)
		for (size_t n = 0; n < PAGES; n++) {
			uint64_t found = 0;
			struct iovec ours = { &number, 8 }, theirs = { area + n * PAGE_BYTES, 8 };
			struct iovec again = { &found, 8 };

			if (!is_outsiders(0, n))
				continue;
			if (last[n] && process_vm_readv(pid, &again, 1, &theirs, 1, 0) != 8)
				return;
			if (last[n] && found != last[n] && table[LOST]++ == 0)
				fprintf(stderr, "page %zu has %llx in place of %llx\n", n, (unsigned long long)found,
					(unsigned long long)last[n]);
			if (process_vm_writev(pid, &ours, 1, &theirs, 1, 0) != 8)
				return;
			last[n] = number;
			table[WRITTEN]++;
			if (!is_long)
				usleep(200);
		}
}

int main(int count, char **words)
{
	int file = count > 1 ? open(words[1], O_RDWR) : -1;
	uint32_t done = 0, own = 0;

	table = file < 0 ? MAP_FAILED : mmap(NULL, TABLE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (table == MAP_FAILED)
		fail("the table");
	close(file);
	if (count > 2) {
		write_from_outside(atoi(words[2]));
		return 0;
	}
	take_area(0);
	table[ADDRESS] = (uintptr_t)areas.pages[0] >> 32;
	table[ADDRESS + 1] = (uint32_t)(uintptr_t)areas.pages[0];
	for (;;) {
		volatile uint32_t *slot = table + HEAD + own * SLOT;

		slot[PID] = getpid();
		if (table[NUMBER] == done) {
			usleep(10000);
			continue;
		}
		done = table[NUMBER];
		switch (table[ORDER]) {
		case 'f': /* The parent forks a worker, or one that gives up root's rights, or one that it traces. */
		case 'u':
		case 'T':
			if (own == 0 && table[WORKERS] < MOST && fork() == 0) {
				if (table[ORDER] == 'u' && (setgroups(0, NULL) || setgid(65534) || setuid(65534)))
					fail("setuid");
				if (table[ORDER] == 'T' && ptrace(PTRACE_TRACEME, 0, NULL, NULL))
					fail("ptrace");
				own = ++table[WORKERS];
				slot = table + HEAD + own * SLOT;
				take_area(1);
				slot[PID] = getpid();
			}
			break;
		case 'g': /* The last worker forks another one. */
			if (own && own == table[WORKERS] && own < MOST && fork() == 0) {
				own++;
				slot = table + HEAD + own * SLOT;
				slot[PID] = getpid();
				table[WORKERS] = own;
			}
			break;
		case 'w': /* Some pages get a content that they share with none. */
			write_pages(100 + own);
			break;
		case 'b': /* Some pages are as they were. */
			write_pages(1 + done % CONTENTS);
			break;
		case 'd':
		case 'D': /* Nobody touches the pages until another order comes. */
			discard_pages();
			break;
		case 's':
			discard_one_by_one();
			break;
		case 'k': /* Workers have the kernel's own threads write and discard pages, or only write. */
		case 'K':
			if (!own)
				break;
			open_ring();
			for (int n = 0; n < ROUNDS; n++) {
				let_kernel_write(table[ORDER] == 'k');
				slot[WRONG] += wrong();
			}
			close_ring();
			break;
		case 'h': /* The parent has a device hold pages, or lets it write them. */
			if (!own)
				begin_late_reads();
			break;
		case 'l':
			if (!own)
				end_late_reads();
			break;
		case 'm': /* Pages change their protection, or have the one that they had at first. */
		case 'M':
			change_protection(table[ORDER] == 'M');
			break;
		case 'a': /* Pages get advice. */
			give_advice();
			break;
		case 't':
			if (own)
				slot[FAULTS] = touch_page(table[TOUCHED]);
			break;
		case 'x': /* The last worker executes a program. */
			if (own && own == table[WORKERS])
				execl("/bin/sleep", "sleep", "300", NULL);
			break;
		}
		if (table[ORDER] != 'D' && table[ORDER] != '-')
			slot[WRONG] += wrong();
		slot[DONE] = done;
	}
}
