/* SPDX-License-Identifier: MIT */
/*
 * penstock copy: bytes from one side to the other.
 *
 * One side in memory: a single job between the object and the whole of that memory. Both sides
 * objects: two windows of host memory take turns; while window i is written, window i + 1 is read.
 * The first is the second with one window and one direction, so there is one loop for all:
 *
 *	step      0        1        2        3
 *	read   window 0     1        2
 *	write            window 0    1        2
 *
 * The destination changes only when all of it is there and the commit succeeds.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include "base/error.h"
#include "base/pattern.h"
#include "base/text.h"
#include "commands.h"
#include "interrupt.h"
#include "progress.h"
#include "report.h"
#include "seconds.h"
#include "side.h"
#include "compare.h"
#include "watch.h"

#define CHUNK_MAX ((size_t)4 << 20)		/* to fill and compare memory by */
#define MEMORY_LIMIT ((uint64_t)128 << 20)	/* the engine's own default */
#define NOT_GIVEN UINT64_MAX

struct settings {
	struct pen_options engine;
	uint64_t size, offset;
	bool verify, in_place, json, quiet;
};

#define AT(field) .where = offsetof(struct settings, field)

static const struct option_entry copy_options[] = {
	OPTIONS_TRANSFER,
	{ "size", 0, OPTION_SIZE, "SIZE", AT(size), .max = INT64_MAX,
	  .help = "Copy this much; needed where the source is memory or null:" },
	{ "offset", 0, OPTION_SIZE, "SIZE", AT(offset), .max = INT64_MAX,
	  .help = "Start this far into the source" },
	{ "verify", 0, OPTION_FLAG, AT(verify),
	  .help = "Read both sides again afterwards and compare" },
	{ "in-place", 0, OPTION_FLAG, AT(in_place),
	  .help = "Overwrite the destination's own bytes instead of replacing the file" },
	OPTIONS_ENGINE,
	{ "json", 0, OPTION_FLAG, AT(json), .help = "Report as one JSON object" },
	{ "quiet", 'q', OPTION_FLAG, AT(quiet),
	  .help = "No progress bar and no report for people" },
	{ "help", 'h', OPTION_HELP, .help = "Show this" },
	{ .name = NULL },
};

struct copy {
	struct settings set;
	struct side from, to;
	struct pen_device *device;	/* of the side that is memory, else the host */
	struct pen_object *in, *out;	/* NULL where that side is memory */
	unsigned char *memory[2];	/* a memory side's own, or the windows */
	uint64_t length;		/* to copy */
	uint64_t window;		/* size of each memory[] in use */
	bool overwrites;		/* what is there, byte by byte */
	bool committed;
	struct progress progress;
	struct report report;
};

/* ------------------------------------------------------------------------- what was asked -- */

/* An error of the two sides together. */
static int refuse(const struct copy *copy, const char *why, struct pen_error *err)
{
	char both[sizeof(err->object)];

	snprintf(both, sizeof(both), "%s to %s", copy->from.name, copy->to.name);
	return error_set(err, -EINVAL, "copy", both, -1, "%s", why);
}

static bool between_objects(const struct copy *copy)
{
	return copy->from.kind != SIDE_MEMORY && copy->to.kind != SIDE_MEMORY;
}

/*
 * Between two objects the memory limit is for all of it: a quarter for each window, and one for
 * what each of the two jobs may pin.
 */
static int share_limit(struct copy *copy, struct pen_error *err)
{
	struct pen_options *engine = &copy->set.engine;
	uint64_t limit = engine->memory_limit ? engine->memory_limit : MEMORY_LIMIT;
	uint64_t least = 4 * (engine->request_size > OPTIONS_MEMORY_LEAST ? engine->request_size
									  : OPTIONS_MEMORY_LEAST);
	char room[TEXT_SIZE_MAX];

	if (!between_objects(copy))
		return 0;
	if (limit < least) {
		error_set(err, -EINVAL, "keep within", "the memory limit", -1,
			  "a copy from object to object takes four requests at least");
		error_hint(err, "Allow at least %s%s", text_from_size(least, room, sizeof(room)),
			   engine->request_size ? ", or lower the request size" : "");
		return -EINVAL;
	}
	engine->memory_limit = limit / 4;
	return 0;
}

/* What cannot be meant, whatever the machine. */
static int check_request(const struct copy *copy, struct pen_error *err)
{
	const struct settings *set = &copy->set;
	bool from_memory = copy->from.kind == SIDE_MEMORY, to_memory = copy->to.kind == SIDE_MEMORY;
	int rc = side_check(&copy->from, err);

	if (!rc)
		rc = side_check(&copy->to, err);
	if (rc)
		return rc;
	if (from_memory && to_memory) {
		refuse(copy, "both are memory", err);
		error_hint(err, "One side must be a file, null: or pattern:SIZE");
		return -EINVAL;
	}
	if (set->size == NOT_GIVEN && (from_memory || copy->from.kind == SIDE_NULL)) {
		refuse(copy, "the source has no size of its own", err);
		error_hint(err, "Say how much with --size, such as --size 1G");
		return -EINVAL;
	}
	if (set->offset && from_memory) {
		error_set(err, -EINVAL, "use", "--offset", -1,
			  "the source is memory, which is filled from its start");
		error_hint(err, "Leave --offset out, or name a file as the source");
		return -EINVAL;
	}
	if (set->in_place && to_memory) {
		error_set(err, -EINVAL, "use", "--in-place", -1,
			  "the destination is memory, not a file");
		error_hint(err, "Leave --in-place out, or name a file as the destination");
		return -EINVAL;
	}
	if (set->verify && copy->to.kind == SIDE_NULL) {
		error_set(err, -EINVAL, "use", "--verify", -1,
			  "what is written to null: cannot be read back");
		error_hint(err, "Leave --verify out, or name a file or host: as the destination");
		return -EINVAL;
	}
	return 0;
}

/* How much there is to copy: the rest of the source, or what --size says where that is less. */
static int find_length(struct copy *copy, struct pen_error *err)
{
	uint64_t offset = copy->set.offset, size;

	copy->length = copy->set.size;
	if (!copy->in)
		return 0;
	size = pen_object_size(copy->in);
	if (offset > size) {
		error_set(err, -EINVAL, "start in", copy->from.name, (int64_t)offset,
			  "it has only %llu bytes", (unsigned long long)size);
		error_hint(err, "Take a smaller --offset");
		return -EINVAL;
	}
	if (copy->length > size - offset)
		copy->length = size - offset;
	return 0;
}

/* ------------------------------------------------------------------------------ the sides -- */

/* A file that is not there yet goes away again; what is no file has nothing to put beside it. */
static bool will_overwrite(const struct copy *copy)
{
	struct stat info;

	return copy->to.kind == SIDE_FILE && !stat(copy->to.name, &info) &&
	       (copy->set.in_place || !S_ISREG(info.st_mode));
}

static int open_sides(struct copy *copy, struct pen_error *err)
{
	const char *device = "host";
	int rc;

	if (copy->from.kind == SIDE_MEMORY)
		device = side_device(&copy->from);
	else if (copy->to.kind == SIDE_MEMORY)
		device = side_device(&copy->to);

	/* The device first: it goes on starting while files are opened. */
	rc = pen_device_open(device, &copy->device, err);
	if (!rc && copy->from.kind != SIDE_MEMORY)
		rc = pen_object_open(copy->from.name, PEN_READ, 0, &copy->in, err);
	if (!rc)
		rc = find_length(copy, err);
	copy->overwrites = will_overwrite(copy);
	if (!rc && copy->to.kind != SIDE_MEMORY)
		rc = pen_object_open(copy->to.name,
				     copy->set.in_place ? PEN_WRITE_IN_PLACE : PEN_WRITE,
				     copy->length, &copy->out, err);
	return rc;
}

/* A memory side has room for all of the copy. */
static int take_memory(struct copy *copy, struct pen_error *err)
{
	int rc = 0;

	copy->window = copy->length;
	/* Requests stay aligned. */
	if (between_objects(copy))
		copy->window = copy->set.engine.memory_limit & ~(uint64_t)4095;
	/* What is read into memory the job allocates itself, so that it can read ahead while a GPU
	 * is still starting. */
	for (int i = 0; !rc && copy->out && i < 2 && i * copy->window < copy->length; i++)
		rc = pen_device_alloc(copy->device, copy->window, (void **)&copy->memory[i], err);
	return rc;
}

/* What memory is filled and sides are compared by: a quarter of the limit, as two are needed. */
static size_t chunk_size(const struct copy *copy)
{
	uint64_t limit = copy->set.engine.memory_limit;
	uint64_t share = between_objects(copy) ? limit : (limit ? limit : MEMORY_LIMIT) / 4;

	return share < CHUNK_MAX ? (size_t)share & ~(size_t)4095 : CHUNK_MAX;
}

static int fill_memory(struct copy *copy, struct pen_error *err)
{
	size_t size = chunk_size(copy);
	unsigned char *chunk = malloc(size);
	int rc = 0;

	if (!chunk)
		return error_sys(err, -ENOMEM, "fill", copy->from.name, -1);
	progress_start(&copy->progress, "filling", copy->length);
	for (uint64_t at = 0; !rc && at < copy->length; at += size) {
		size_t piece = copy->length - at < size ? (size_t)(copy->length - at) : size;

		pattern_fill(chunk, piece, at);
		rc = pen_device_put(copy->device, copy->memory[0] + at, chunk, piece, err);
		progress_show(&copy->progress, at + piece);
		if (!rc && interrupt_signal())
			rc = -ECANCELED;
	}
	progress_end(&copy->progress);
	free(chunk);
	return rc;
}

static void close_sides(struct copy *copy)
{
	for (int i = 0; i < 2; i++)
		if (copy->memory[i])
			pen_device_free(copy->device, copy->memory[i], copy->window, NULL);
	pen_object_close(copy->in);
	pen_object_close(copy->out);
	pen_device_close(copy->device);
}

/* -------------------------------------------------------------------------------- the jobs -- */

/* The options of a job. Dropping is for whole objects: the last job of each does it for all. */
static struct pen_options job_options(struct copy *copy, const struct pen_extent *extent,
				      uint64_t object_start)
{
	struct pen_options options = copy->set.engine;
	bool last = extent && extent->offset + extent->length == object_start + copy->length;

	if (!last && options.cache == PEN_CACHE_DROP)
		options.cache = PEN_CACHE_AUTO;
	if (!copy->out) {
		options.allocate = copy->length;
		options.allocated = (void **)&copy->memory[0];
	}
	return options;
}

/* Read into one window and write from the other at the same time; either may be NULL. */
static int step(struct copy *copy, const struct pen_extent *in, const struct pen_extent *out,
		struct pen_error *err)
{
	struct pen_options reading = job_options(copy, in, copy->set.offset);
	struct pen_options writing = job_options(copy, out, 0);
	struct pen_job *jobs[2] = { NULL, NULL };
	int rc = 0;

	/* Injected once, not twice: a bit that is flipped again on the way out would be right. */
	if (copy->in)
		writing.inject = NULL;
	if (in)
		rc = pen_job_start(PEN_READ, copy->device, in, 1, &reading, &jobs[0], err);
	if (!rc && out)
		rc = pen_job_start(PEN_WRITE, copy->device, out, 1, &writing, &jobs[1], err);
	if (rc && jobs[0])
		pen_job_cancel(jobs[0]);
	watch_jobs(jobs, 2, &copy->progress, copy->report.read.bytes + copy->report.write.bytes,
		   (copy->in != NULL) + (copy->out != NULL));
	if (jobs[0])
		watch_finish(jobs[0], &copy->report.read, &rc, err);
	if (jobs[1])
		watch_finish(jobs[1], &copy->report.write, &rc, err);
	return rc;
}

/* Window `number` of the copy, and its place in `object`, `offset` bytes from the start of it. */
static struct pen_extent window_extent(const struct copy *copy, struct pen_object *object,
				       uint64_t offset, uint64_t number)
{
	uint64_t start = number * copy->window, left = copy->length - start;

	return (struct pen_extent){
		.object = object,
		.offset = offset + start,
		.memory = copy->memory[number % 2],
		.length = left < copy->window ? left : copy->window,
	};
}

static int move(struct copy *copy, struct pen_error *err)
{
	uint64_t lag = copy->in && copy->out;	/* steps between reading a window and writing it */
	uint64_t windows = copy->length ? (copy->length - 1) / copy->window + 1 : 1;
	double start = seconds_now();
	int rc = 0;

	progress_start(&copy->progress, "copying", copy->length);
	for (uint64_t i = 0; !rc && i < windows + lag; i++) {
		struct pen_extent in, out;
		bool reads = copy->in && i < windows, writes = copy->out && i >= lag;

		if (reads)
			in = window_extent(copy, copy->in, copy->set.offset, i);
		if (writes)
			out = window_extent(copy, copy->out, 0, i - lag);
		rc = step(copy, reads ? &in : NULL, writes ? &out : NULL, err);
	}
	progress_end(&copy->progress);

	/* A single job knows its own time best; of many, only the whole counts. */
	copy->report.seconds = lag ? seconds_now() - start
				   : copy->report.read.seconds + copy->report.write.seconds;
	return rc;
}

static int commit(struct copy *copy, struct pen_error *err)
{
	double start = seconds_now();
	int rc;

	if (interrupt_signal())
		return -ECANCELED;
	rc = pen_object_commit(copy->out, err);
	copy->committed = !rc;
	copy->report.commit_seconds = seconds_now() - start;
	copy->report.seconds += copy->report.commit_seconds;
	return rc;
}

static int check_result(struct copy *copy, struct pen_error *err)
{
	struct compare_side from = {
		.side = &copy->from,
		.offset = copy->set.offset,
		.device = copy->device,
		.memory = copy->memory[0],
	};
	struct compare_side to = {
		.side = &copy->to,
		.device = copy->device,
		.memory = copy->memory[0],
	};
	int rc = compare_sides(&from, &to, copy->length, chunk_size(copy),
			       copy->set.engine.cache == PEN_CACHE_DROP, &copy->progress,
			       copy->report.hash, err);

	copy->report.verified = !rc;
	return rc;
}

static int run(struct copy *copy, struct pen_error *err)
{
	double start = seconds_now();
	int rc = open_sides(copy, err);

	if (!rc)
		rc = take_memory(copy, err);
	copy->report.open_seconds = seconds_now() - start;
	if (!rc && !copy->in)
		rc = fill_memory(copy, err);
	if (!rc)
		rc = move(copy, err);
	if (!rc && copy->out)
		rc = commit(copy, err);
	if (!rc && copy->set.verify)
		rc = check_result(copy, err);
	return rc;
}

/* ---------------------------------------------------------------------------- the command -- */

static void tell_interruption(const struct copy *copy, struct pen_error *err)
{
	const char *state = "";

	if (copy->committed)
		state = "is complete, but was not verified";
	else if (copy->to.kind == SIDE_FILE)
		state = copy->overwrites ? "may hold some of the new bytes"
					 : "was left as it was";
	error_set(err, -ECANCELED, "copy to", copy->to.name, -1, "interrupted%s%s%s%s",
		  state[0] ? "; " : "", state[0] ? copy->to.name : "", state[0] ? " " : "", state);
	error_hint(err, "Run it again; it starts from the beginning");
}

static int name_sides(struct copy *copy, char **names, struct pen_error *err)
{
	int rc = side_init(&copy->from, names[0], err);

	if (!rc)
		rc = side_init(&copy->to, names[1], err);
	return rc;
}

static int run_copy(int argc, char **argv)
{
	struct copy copy = {
		.set = { .engine = PEN_OPTIONS_INIT, .size = NOT_GIVEN },
		.report = { .read = PEN_REPORT_INIT, .write = PEN_REPORT_INIT },
	};
	struct pen_error err;
	int status = STATUS_USAGE;
	int rc = options_parse(&command_copy, argc, argv, &copy.set, &err);

	if (rc > 0)
		return STATUS_OK;
	if (!rc)
		rc = name_sides(&copy, argv, &err);
	if (!rc)
		rc = check_request(&copy, &err);
	if (!rc)
		rc = share_limit(&copy, &err);
	if (!rc)
		rc = options_check(&copy.set.engine, &err);
	if (!rc) {
		status = STATUS_FAILURE;
		interrupt_init();
		progress_init(&copy.progress, !copy.set.quiet);
		rc = side_enter_directory(&copy.to, &copy.from, &err);
		if (!rc && side_same(&copy.from, &copy.to)) {
			rc = refuse(&copy, "both are the same file", &err);
			error_hint(&err, "Name another file as the destination");
		} else if (!rc) {
			rc = run(&copy, &err);
		}
		if (rc == -ECANCELED && interrupt_signal()) {
			status = 128 + interrupt_signal();
			tell_interruption(&copy, &err);
		}
	}
	copy.report.source = copy.from.name;
	copy.report.destination = copy.to.name;
	copy.report.transfer = pen_transfer_name(copy.set.engine.transfer);
	if (rc)
		report_error(&err, copy.set.json);
	else if (copy.set.json || !copy.set.quiet)
		report_copy(&copy.report, copy.set.json);
	close_sides(&copy);
	side_fini(&copy.from);
	side_fini(&copy.to);
	return rc ? status : STATUS_OK;
}

const struct command command_copy = {
	.name = "copy",
	.operands = "SRC DST",
	.operand_count = 2,
	.summary = "move bytes from one side to the other by the best path",
	.description = "Copy SRC to DST. Each is a file, null:, pattern:SIZE (bytes that state "
		       "their own offset), or memory: host: or cuda:N. A file is replaced only "
		       "when all of it has arrived.",
	.options = copy_options,
	.run = run_copy,
};
