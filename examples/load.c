/* SPDX-License-Identifier: MIT */
/*
 * Load a file into GPU memory; on a machine without a GPU, into host memory. Nothing else changes:
 * a device is a name, and the engine finds the best path to it for each part of the file.
 *
 *	cc -o load load.c $(pkg-config --cflags --libs penstock)
 *	./load weights.bin
 */
#include <penstock.h>
#include <stdio.h>

static int fail(const struct pen_error *err)
{
	char text[1024];

	pen_error_format(err, text, sizeof(text));
	fprintf(stderr, "load: %s\n", text);
	return 1;
}

int main(int argc, char **argv)
{
	struct pen_error err;
	struct pen_device *device;
	struct pen_object *file;
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_extent all = { 0 };
	unsigned char first[8] = { 0 };

	if (argc != 2) {
		fprintf(stderr, "usage: load FILE\n");
		return 2;
	}

	/* The GPU starts up in the background; the first job reads ahead meanwhile. */
	if (pen_device_open("cuda:0", &device, &err)) {
		printf("no GPU (%s), so into host memory\n", err.message);
		if (pen_device_open("host", &device, &err))
			return fail(&err);
	}

	if (pen_object_open(argv[1], PEN_READ, 0, &file, &err))
		return fail(&err);
	all.object = file;
	all.length = pen_object_size(file);
	if (pen_device_alloc(device, all.length, &all.memory, &err))
		return fail(&err);

	if (pen_transfer(PEN_READ, device, &all, 1, NULL, &report, &err))
		return fail(&err);
	printf("%llu bytes into %s in %.3f s, %.2f GB/s\n", (unsigned long long)report.bytes,
	       report.device, report.seconds, report.gb_per_s);

	/* The bytes are there: small looks at them go through pen_device_get(). */
	if (all.length >= sizeof(first)) {
		if (pen_device_get(device, first, all.memory, sizeof(first), &err))
			return fail(&err);
		printf("it begins with");
		for (size_t i = 0; i < sizeof(first); i++)
			printf(" %02x", first[i]);
		printf("\n");
	}

	pen_device_free(device, all.memory, all.length, NULL);
	pen_object_close(file);
	pen_device_close(device);
	return 0;
}
