/*
 * Discards folded memory in every way there is, and checks that what was discarded reads as zeros and that everything
 * else is as it was. Prints one line of JSON.
 */
#include "pages.h"
#include <linux/io_uring.h>
#include <sys/syscall.h>

enum { PAGES = 512 };

static int by_libc(char *start, size_t bytes)
{
	return madvise(start, bytes, MADV_DONTNEED);
}

static int by_syscall(char *start, size_t bytes)
{
	return syscall(SYS_madvise, start, bytes, MADV_DONTNEED);
}

static int by_instruction(char *start, size_t bytes)
{
	long answer;

	__asm__ volatile("syscall"
			 : "=a"(answer)
			 : "a"(SYS_madvise), "D"(start), "S"(bytes), "d"(MADV_DONTNEED)
			 : "rcx", "r11", "memory");
	errno = answer < 0 ? -answer : 0;
	return answer < 0 ? -1 : 0;
}

static int by_process_madvise(char *start, size_t bytes)
{
	struct iovec { void *base; size_t bytes; } part = { start, bytes };
	int self = syscall(SYS_pidfd_open, getpid(), 0);
	long done = syscall(SYS_process_madvise, self, &part, 1, MADV_DONTNEED, 0);
	int error = errno;

	close(self);
	errno = error;
	return done == (long)bytes ? 0 : -1;
}

/* A new ring for each call: one entry, and its answer. */
static int by_io_uring(char *start, size_t bytes)
{
	struct io_uring_params setup = { 0 };
	int ring = syscall(SYS_io_uring_setup, 1, &setup);

	if (ring < 0)
		return -1;
	/* Both queues are in one mapping since Linux 5.4. */
	size_t queue_bytes = setup.cq_off.cqes + setup.cq_entries * sizeof(struct io_uring_cqe);

	if (queue_bytes < setup.sq_off.array + setup.sq_entries * sizeof(unsigned))
		queue_bytes = setup.sq_off.array + setup.sq_entries * sizeof(unsigned);
	char *queues = mmap(NULL, queue_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
	struct io_uring_sqe *entry = mmap(NULL, sizeof(*entry), PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);

	if (queues == MAP_FAILED || entry == MAP_FAILED)
		fail("map a ring");
	*entry = (struct io_uring_sqe){ .opcode = IORING_OP_MADVISE, .fd = -1, .addr = (uintptr_t)start,
					.len = bytes, .fadvise_advice = MADV_DONTNEED };
	((unsigned *)(queues + setup.sq_off.array))[0] = 0;
	__atomic_store_n((unsigned *)(queues + setup.sq_off.tail), 1, __ATOMIC_RELEASE);
	if (syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) != 1)
		fail("io_uring_enter");
	int answer = ((struct io_uring_cqe *)(queues + setup.cq_off.cqes))[0].res;

	munmap(queues, queue_bytes);
	munmap(entry, sizeof(*entry));
	close(ring);
	errno = answer < 0 ? -answer : 0;
	return answer < 0 ? -1 : 0;
}

static struct way {
	const char *name;
	int (*discard)(char *start, size_t bytes);
	char *area;
	int error;
	size_t wrong, later_wrong;
} ways[] = {
	{ "libc", by_libc }, { "syscall", by_syscall }, { "instruction", by_instruction },
	{ "process_madvise", by_process_madvise }, { "io_uring", by_io_uring },
};
enum { WAYS = sizeof(ways) / sizeof(*ways) };

int main(void)
{
	size_t folded = 0;

	for (int i = 0; i < WAYS; i++)
		ways[i].area = filled_area(PAGES);
	for (int i = 0; i < WAYS; i++)
		folded += wait_until_folded(ways[i].area, PAGES);
	for (int i = 0; i < WAYS; i++) {
		ways[i].error = discard_runs(ways[i].area, PAGES, ways[i].discard);
		ways[i].wrong = wrong_after_discard(ways[i].area, PAGES);
	}
	/* Nothing comes back when more is folded. */
	sleep(3);
	for (int i = 0; i < WAYS; i++)
		ways[i].later_wrong = wrong_after_discard(ways[i].area, PAGES);

	printf("{\"folded_pages\": %zu, \"ways\": {", folded);
	for (int i = 0; i < WAYS; i++)
		printf("%s\"%s\": {\"error\": %d, \"wrong_pages\": %zu, \"wrong_pages_later\": %zu}", i ? ", " : "",
		       ways[i].name, ways[i].error, ways[i].wrong, ways[i].later_wrong);
	printf("}}\n");
	return 0;
}
