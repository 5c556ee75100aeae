/* SPDX-License-Identifier: MIT */
/*
 * Save memory to a file so that it survives whatever comes: until pen_object_commit() returns, the
 * old file is untouched; afterwards the new one is complete and on disk. There is no moment in
 * between, not for readers and not for a power cut, and a program that dies leaves no litter.
 *
 *	cc -o save save.c $(pkg-config --cflags --libs penstock)
 *	./save checkpoint.bin 100000000 [host | cuda:0]
 */
#include <penstock.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int fail(const struct pen_error *err)
{
	char text[1024];

	pen_error_format(err, text, sizeof(text));
	fprintf(stderr, "save: %s\n", text);
	return 1;
}

/* Something to save; in real life it is there already. */
static int make_state(struct pen_device *device, uint64_t size, void **memory,
		      struct pen_error *err)
{
	unsigned char *state = malloc(size ? size : 1);
	int rc;

	if (!state)
		abort();
	memset(state, 'p', size);
	rc = pen_device_alloc(device, size, memory, err);
	if (!rc)
		rc = pen_device_put(device, *memory, state, size, err);
	free(state);
	return rc;
}

int main(int argc, char **argv)
{
	struct pen_error err;
	struct pen_device *device;
	struct pen_extent all = { 0 };
	struct pen_report report = PEN_REPORT_INIT;
	int rc;

	if (argc < 3) {
		fprintf(stderr, "usage: save FILE SIZE [DEVICE]\n");
		return 2;
	}
	all.length = strtoull(argv[2], NULL, 0);
	if (pen_device_open(argc > 3 ? argv[3] : "host", &device, &err) ||
	    make_state(device, all.length, &all.memory, &err))
		return fail(&err);

	/* The size is told at once, so that a disk that is too small says so now. */
	if (pen_object_open(argv[1], PEN_WRITE, all.length, &all.object, &err))
		return fail(&err);
	rc = pen_transfer(PEN_WRITE, device, &all, 1, NULL, &report, &err);
	if (!rc)
		rc = pen_object_commit(all.object, &err);
	/* Closing what was not committed throws it away. */
	pen_object_close(all.object);
	if (rc)
		return fail(&err);
	printf("saved %llu bytes from %s, %.2f GB/s before the flush\n",
	       (unsigned long long)report.bytes, report.device, report.gb_per_s);

	pen_device_free(device, all.memory, all.length, NULL);
	pen_device_close(device);
	return 0;
}
