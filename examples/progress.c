/* SPDX-License-Identifier: MIT */
/*
 * Watch a job and stop it with Ctrl-C. pen_job_start() returns while the bytes move;
 * pen_job_poll() tells how far they are; pen_job_cancel() may be called from a signal handler;
 * pen_job_wait() brings everything home, however the job ended.
 *
 *	cc -o progress progress.c $(pkg-config --cflags --libs penstock)
 *	./progress pattern:2G,rate=400M [host | cuda:0]
 */
#include <errno.h>
#include <penstock.h>
#include <signal.h>
#include <stdio.h>
#include <time.h>

static struct pen_job *job;

static int fail(const struct pen_error *err)
{
	char text[1024];

	pen_error_format(err, text, sizeof(text));
	fprintf(stderr, "progress: %s\n", text);
	return err->code == -ECANCELED ? 128 + SIGINT : 1;
}

static void interrupted(int number)
{
	(void)number;
	pen_job_cancel(job);
}

/* Until the job has ended, whether well or badly. */
static void watch(void)
{
	const struct timespec pause = { .tv_nsec = 100000000 };
	struct pen_progress progress;
	double bytes;

	do {
		nanosleep(&pause, NULL);
		pen_job_poll(job, &progress);
		bytes = (double)progress.bytes;
		printf("\r%5.1f %%  %.2f GB/s ",
		       progress.total ? 100 * bytes / (double)progress.total : 100,
		       bytes / progress.seconds / 1e9);
		fflush(stdout);
	} while (progress.state < PEN_DONE);
	printf("\n");
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_handler = interrupted };
	struct pen_error err;
	struct pen_device *device;
	struct pen_extent all = { 0 };
	int rc;

	if (argc < 2) {
		fprintf(stderr, "usage: progress SOURCE [DEVICE]\n");
		return 2;
	}
	if (pen_device_open(argc > 2 ? argv[2] : "host", &device, &err) ||
	    pen_object_open(argv[1], PEN_READ, 0, &all.object, &err))
		return fail(&err);
	all.length = pen_object_size(all.object);
	if (pen_device_alloc(device, all.length, &all.memory, &err))
		return fail(&err);

	if (pen_job_start(PEN_READ, device, &all, 1, NULL, &job, &err))
		return fail(&err);
	sigaction(SIGINT, &action, NULL);
	watch();
	/* pen_job_wait() releases the job: the handler must not see it any more. */
	signal(SIGINT, SIG_DFL);
	rc = pen_job_wait(job, NULL, &err);
	if (!rc)
		printf("all %llu bytes are there\n", (unsigned long long)all.length);

	pen_device_free(device, all.memory, all.length, NULL);
	pen_object_close(all.object);
	pen_device_close(device);
	return rc ? fail(&err) : 0;
}
