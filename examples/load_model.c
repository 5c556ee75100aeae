/* SPDX-License-Identifier: MIT */
/*
 * Load a model - a .safetensors file, or a folder of them - and say what lands as it lands. The job
 * allocates one piece of device memory for all tensors; the placements are their places in it, and
 * their numbers are the groups that pen_job_landed() tells.
 *
 *	cc -o load_model load_model.c $(pkg-config --cflags --libs penstock)
 *	./load_model MODEL [host | cuda:0]
 */
#include <penstock.h>
#include <stdio.h>
#include <stdlib.h>

static int fail(const struct pen_error *err)
{
	char text[1024];

	pen_error_format(err, text, sizeof(text));
	fprintf(stderr, "load_model: %s\n", text);
	return 1;
}

static void show(const struct pen_tensor *tensor)
{
	printf("%-8s [", pen_dtype_name(tensor->dtype));
	for (uint32_t i = 0; i < tensor->rank; i++)
		printf("%s%llu", i ? ", " : "", (unsigned long long)tensor->shape[i]);
	printf("] %s\n", tensor->name);
}

int main(int argc, char **argv)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_report report = PEN_REPORT_INIT;
	const struct pen_tensor *tensors;
	struct pen_placement *places;
	struct pen_device *device;
	struct pen_model *model;
	struct pen_error err;
	struct pen_job *job;
	uint64_t total, groups[64];
	size_t count, landed;
	void *memory = NULL;
	int running;

	if (argc < 2) {
		fprintf(stderr, "usage: load_model MODEL [DEVICE]\n");
		return 2;
	}
	if (pen_device_open(argc > 2 ? argv[2] : "host", &device, &err) ||
	    pen_model_open(argv[1], &model, &err))
		return fail(&err);

	/* All tensors, whole. A box of one would have `start` and `stop` too. */
	count = pen_model_tensors(model, &tensors);
	places = calloc(count ? count : 1, sizeof(*places));
	if (!places)
		return 1;
	for (size_t i = 0; i < count; i++)
		places[i].tensor = &tensors[i];
	if (pen_placement_layout(places, count, &total, &err))
		return fail(&err);

	options.allocate = total;
	options.allocated = &memory;
	options.groups = count;
	if (pen_load_start(model, device, places, count, &options, &job, &err))
		return fail(&err);
	do {
		/* Asked first: nothing lands after the end, so an empty answer is the last. */
		running = pen_job_wait_for(job, 0);
		landed = pen_job_landed(job, groups, 64, 0.1);
		for (size_t i = 0; i < landed; i++)
			show(places[groups[i]].tensor);
	} while (landed || running);
	if (pen_job_wait(job, &report, &err))
		return fail(&err);

	/* Tensor i is at (char *)memory + (uintptr_t)places[i].memory, for anybody to use. */
	printf("%zu tensors, %llu bytes into %s in %.3f s, %.2f GB/s\n", count,
	       (unsigned long long)report.bytes, report.device, report.seconds, report.gb_per_s);
	free(places);
	pen_model_close(model);
	pen_device_free(device, memory, total, NULL);
	pen_device_close(device);
	return 0;
}
