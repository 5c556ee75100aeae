/* SPDX-License-Identifier: MIT */
/*
 * Many pieces in one job. Here: of a file that holds a matrix row by row, one of several workers
 * wants its share of the columns, packed, and besides the first and the last row whole. That is
 * three extents, one of them strided; the engine sorts them, merges what lies close together,
 * reads each byte about once and scatters the pieces to their places.
 *
 *	cc -o slices slices.c $(pkg-config --cflags --libs penstock)
 *	./slices matrix.bin ROW_BYTES WORKER WORKERS [host | cuda:0]
 */
#include <penstock.h>
#include <stdio.h>
#include <stdlib.h>

static int fail(const struct pen_error *err)
{
	char text[1024];

	pen_error_format(err, text, sizeof(text));
	fprintf(stderr, "slices: %s\n", text);
	return 1;
}

int main(int argc, char **argv)
{
	struct pen_error err;
	struct pen_device *device;
	struct pen_object *file;
	struct pen_report report = PEN_REPORT_INIT;
	uint64_t row, rows, part, worker, size, sum = 0;
	unsigned char *memory, *copy;
	void *room;

	if (argc < 5 || strtoull(argv[2], NULL, 0) == 0 || strtoull(argv[4], NULL, 0) == 0) {
		fprintf(stderr, "usage: slices FILE ROW_BYTES WORKER WORKERS [DEVICE]\n");
		return 2;
	}
	if (pen_device_open(argc > 5 ? argv[5] : "host", &device, &err) ||
	    pen_object_open(argv[1], PEN_READ, 0, &file, &err))
		return fail(&err);

	row = strtoull(argv[2], NULL, 0);
	rows = pen_object_size(file) / row;
	if (!rows) {
		fprintf(stderr, "slices: %s has not even one row\n", argv[1]);
		return 1;
	}
	worker = strtoull(argv[3], NULL, 0);
	part = row / strtoull(argv[4], NULL, 0);
	size = rows * part + 2 * row;
	if (pen_device_alloc(device, size, &room, &err))
		return fail(&err);
	memory = room;

	struct pen_extent pieces[] = {
		/* `rows` rows of `part` bytes: apart in the file, side by side in memory. */
		{ .object = file, .offset = worker * part, .memory = memory, .length = part,
		  .rows = rows, .object_pitch = row, .memory_pitch = part },
		{ .object = file, .offset = 0, .memory = memory + rows * part, .length = row },
		{ .object = file, .offset = (rows - 1) * row, .memory = memory + rows * part + row,
		  .length = row },
	};

	if (pen_transfer(PEN_READ, device, pieces, 3, NULL, &report, &err))
		return fail(&err);

	/* For the eye: the sum of all bytes that arrived. */
	copy = malloc(size);
	if (!copy || pen_device_get(device, copy, memory, size, &err))
		return fail(&err);
	for (uint64_t i = 0; i < size; i++)
		sum += copy[i];
	printf("%llu bytes wanted, %llu read, sum %llu\n", (unsigned long long)report.bytes,
	       (unsigned long long)report.storage_bytes, (unsigned long long)sum);

	free(copy);
	pen_device_free(device, memory, size, NULL);
	pen_object_close(file);
	pen_device_close(device);
	return 0;
}
