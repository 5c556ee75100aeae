/* SPDX-License-Identifier: MIT */
/*
 * Ask before, ask afterwards, and take errors apart. pen_explain() tells what the engine would do
 * with a file on this machine and what keeps it from doing better; the report tells what it did;
 * an error says what was attempted, on what, at which byte, why it failed and what to do.
 *
 *	cc -o diagnose diagnose.c $(pkg-config --cflags --libs penstock)
 *	./diagnose weights.bin [host | cuda:0]
 */
#include <errno.h>
#include <penstock.h>
#include <stdio.h>

/* Programs branch on the code; people read the words. */
static int fail(const struct pen_error *err)
{
	char text[1024];

	pen_error_format(err, text, sizeof(text));
	fprintf(stderr, "diagnose: %s\n", text);
	return err->code == -ENOENT ? 3 : err->code == -ENODEV ? 4 : 1;
}

static void print_paths(const char *title, const struct pen_path *paths, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		printf("  %s %s (%llu bytes): %s\n", title, paths[i].path,
		       (unsigned long long)paths[i].bytes, paths[i].reason);
}

static int explain(struct pen_object *file, struct pen_device *device, struct pen_error *err)
{
	struct pen_explanation *plan;
	int rc = pen_explain(file, device, NULL, &plan, err);

	if (rc)
		return rc;
	printf("%llu bytes on %s, %llu of them in the page cache\n",
	       (unsigned long long)plan->bytes, plan->filesystem,
	       (unsigned long long)plan->resident);
	print_paths("would take", plan->paths, plan->path_count);
	print_paths("cannot take", plan->refused, plan->refused_count);
	pen_explain_free(plan);
	return 0;
}

int main(int argc, char **argv)
{
	struct pen_error err;
	struct pen_device *device;
	struct pen_extent all = { 0 };
	struct pen_report report = PEN_REPORT_INIT;

	if (argc < 2) {
		fprintf(stderr, "usage: diagnose FILE [DEVICE]\n");
		return 2;
	}
	if (pen_device_open(argc > 2 ? argv[2] : "host", &device, &err) ||
	    pen_object_open(argv[1], PEN_READ, 0, &all.object, &err) ||
	    explain(all.object, device, &err))
		return fail(&err);

	all.length = pen_object_size(all.object);
	if (pen_device_alloc(device, all.length, &all.memory, &err) ||
	    pen_transfer(PEN_READ, device, &all, 1, NULL, &report, &err))
		return fail(&err);
	printf("%.2f GB/s, %.3f CPU-seconds, %llu bytes pinned, %u lanes, %llu retries\n",
	       report.gb_per_s, report.cpu_seconds, (unsigned long long)report.pinned_bytes,
	       report.lanes, (unsigned long long)report.retries);
	print_paths("took", report.paths, report.path_count);

	pen_device_free(device, all.memory, all.length, NULL);
	pen_object_close(all.object);
	pen_device_close(device);
	return 0;
}
