/*
 * Forks children that discard parts of their own copy of folded memory, and checks in each that these read as zeros and
 * that everything else is as it was, there and here. Prints one line of JSON, and a second one from a child that lives
 * on when this process has ended.
 */
#include "pages.h"
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum { PAGES = 512, CHILD_SECONDS = 10 };

static int by_syscall(char *start, size_t bytes)
{
	return syscall(SYS_madvise, start, bytes, MADV_DONTNEED);
}

/* Where children, who may use nothing but system calls, say what they found. */
enum descent { CHILD, GRANDCHILD, ORPHAN };
static struct child {
	const char *name;
	enum descent descent;
	int raw;
	volatile int pid, has_ended;
	volatile size_t wrong;
} *children;
static const struct child all_children[] = {
	{ "raw_child", CHILD, 1 }, { "raw_grandchild", GRANDCHILD, 1 }, { "raw_orphan", ORPHAN, 1 },
	{ "libc_child", CHILD, 0 }, { "libc_grandchild", GRANDCHILD, 0 }, { "libc_orphan", ORPHAN, 0 },
};
enum { CHILDREN = sizeof(all_children) / sizeof(*all_children) };

static int fork_as(const struct child *child)
{
	int pid = child->raw ? (int)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) : fork();

	if (pid < 0)
		fail("fork");
	return pid;
}

static void live(struct child *child, int parent, char *area)
{
	child->pid = getpid();
	while (child->descent == ORPHAN && getppid() == parent)
		usleep(1000);
	size_t wrong_before = wrong_pages(area, PAGES);
	int error = discard_runs(area, PAGES, by_syscall);

	child->wrong = error ? PAGES : wrong_before + wrong_after_discard(area, PAGES);
	child->has_ended = 1;
	_exit(0);
}

static void have_child(struct child *child, char *area)
{
	int first = fork_as(child);

	if (!first) {
		int self = getpid(), second = child->descent == CHILD ? 0 : fork_as(child);

		if (!second)
			live(child, self, area);
		if (child->descent == GRANDCHILD)
			waitpid(second, NULL, 0);
		_exit(0);
	}
	for (int tenths = 0; tenths < CHILD_SECONDS * 10 && !child->has_ended; tenths++)
		usleep(100000);
	if (!child->has_ended) {
		if (child->pid)
			kill(child->pid, SIGKILL);
		kill(first, SIGKILL);
	}
	waitpid(first, NULL, 0);
}

int main(void)
{
	char *area = filled_area(PAGES);
	size_t folded = wait_until_folded(area, PAGES);
	int self = getpid();

	children = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (children == MAP_FAILED)
		fail("mmap");
	memcpy(children, all_children, sizeof(all_children));
	for (int i = 0; i < CHILDREN; i++)
		have_child(&children[i], area);

	printf("{\"folded_pages\": %zu, \"wrong_in_parent\": %zu, \"children\": {", folded, wrong_pages(area, PAGES));
	for (int i = 0; i < CHILDREN; i++)
		printf("%s\"%s\": {\"has_ended\": %d, \"wrong_pages\": %zu}", i ? ", " : "", children[i].name,
		       children[i].has_ended, children[i].wrong);
	printf("}}\n");
	fflush(stdout);

	if (!fork()) {
		while (getppid() == self)
			usleep(1000);
		int error = discard_runs(area, PAGES, by_syscall);

		printf("{\"survivor\": {\"error\": %d, \"wrong_pages\": %zu}}\n", error,
		       wrong_after_discard(area, PAGES));
	}
	return 0;
}
