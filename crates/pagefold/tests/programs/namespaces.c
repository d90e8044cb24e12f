/*
 * Forks two children that fill memory of their own: one in its PID namespace, one as the first process of another, for which nobody
 * mounts a /proc. It prints their numbers. When its input ends, so do they; it prints how many of their pages were wrong.
 */
#include "pages.h"
#include <sched.h>
#include <sys/wait.h>

enum { PAGES = 2048 };

static int ends[2];

static pid_t start(void)
{
	pid_t child = fork();
	char end;

	if (child < 0)
		fail("fork");
	if (child)
		return child;
	close(ends[1]);
	char *area = filled_area(PAGES);
	/* Checks it all the while. */
	fcntl(ends[0], F_SETFL, O_NONBLOCK);
	size_t wrong = 0;
	while (read(ends[0], &end, 1) < 0) {
		wrong += wrong_pages(area, PAGES);
		usleep(20000);
	}
	_exit(wrong || wrong_pages(area, PAGES));
}

int main(void)
{
	char rest[64];
	int status[2];

	if (pipe(ends))
		fail("pipe");
	pid_t plain = start();
	if (unshare(CLONE_NEWPID))
		fail("unshare");
	pid_t inside = start();
	printf("%d %d\n", plain, inside);
	fflush(stdout);
	while (fgets(rest, sizeof rest, stdin))
		;
	close(ends[1]);
	if (waitpid(plain, &status[0], 0) != plain || waitpid(inside, &status[1], 0) != inside)
		fail("waitpid");
	printf("{\"wrong\": %d}\n", (status[0] != 0) + (status[1] != 0));
	return 0;
}
