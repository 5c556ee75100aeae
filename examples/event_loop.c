/* SPDX-License-Identifier: MIT */
/*
 * A program with an event loop of its own reads a file meanwhile: pen_job_eventfd() is one more
 * descriptor to poll, beside the others - here the standard input, where "q" cancels the job. It
 * becomes readable when one of the sixteen parts has landed and when the job has ended.
 *
 *	cc -o event_loop event_loop.c $(pkg-config --cflags --libs penstock)
 *	./event_loop pattern:2G,rate=400M [host | cuda:0]
 */
#include <penstock.h>
#include <poll.h>
#include <stdio.h>
#include <unistd.h>

#define PARTS 16

static int fail(const struct pen_error *err)
{
	char text[1024];

	pen_error_format(err, text, sizeof(text));
	fprintf(stderr, "event_loop: %s\n", text);
	return 1;
}

/* There is news of the job; 1 when it has ended. */
static int hear(struct pen_job *job, int fd)
{
	uint64_t parts[PARTS], value;
	size_t count;
	/* In this order nothing is missed: what comes after the read makes it readable again. */
	int ended = read(fd, &value, sizeof(value)) > 0 && !pen_job_wait_for(job, 0);

	while ((count = pen_job_landed(job, parts, PARTS, 0)))
		for (size_t i = 0; i < count; i++)
			printf("part %llu has landed\n", (unsigned long long)parts[i]);
	return ended;
}

static void loop(struct pen_job *job, int fd)
{
	struct pollfd polled[] = { { fd, POLLIN, 0 }, { STDIN_FILENO, POLLIN, 0 } };
	char key;

	while (poll(polled, 2, -1) >= 0) {
		if (polled[0].revents && hear(job, fd))
			return;
		if (polled[1].revents && read(STDIN_FILENO, &key, 1) != 1)
			polled[1].fd = -1;	/* nobody types any more */
		else if (polled[1].revents && key == 'q')
			pen_job_cancel(job);
	}
}

int main(int argc, char **argv)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_extent parts[PARTS] = { { 0 } };
	struct pen_object *object;
	struct pen_device *device;
	struct pen_error err;
	struct pen_job *job;
	int rc, fd;

	if (argc < 2 || pen_device_open(argc > 2 ? argv[2] : "host", &device, &err) ||
	    pen_object_open(argv[1], PEN_READ, 0, &object, &err))
		return argc < 2 ? 2 : fail(&err);
	for (uint64_t i = 0, size = pen_object_size(object); i < PARTS; i++) {
		parts[i].object = object;
		parts[i].offset = size / PARTS * i;
		parts[i].memory = (void *)(uintptr_t)parts[i].offset;	/* in what is allocated */
		parts[i].length = i == PARTS - 1 ? size - parts[i].offset : size / PARTS;
		parts[i].group = i;
	}
	options.groups = PARTS;
	options.allocate = pen_object_size(object);
	options.allocated = &parts[0].memory;
	if (pen_job_start(PEN_READ, device, parts, PARTS, &options, &job, &err))
		return fail(&err);
	fd = pen_job_eventfd(job, &err);
	if (fd >= 0)
		loop(job, fd);
	rc = pen_job_wait(job, NULL, &err);	/* closes the descriptor, too */
	if (!rc)
		rc = pen_device_free(device, parts[0].memory, options.allocate, &err);
	pen_object_close(object);
	pen_device_close(device);
	return rc ? fail(&err) : 0;
}
