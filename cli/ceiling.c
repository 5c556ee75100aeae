/* SPDX-License-Identifier: MIT */
/*
 * The ceiling of a load; see ceiling.h. A measurement is a job that is stopped when its time is
 * up. Many of its extents share one buffer: what lands there is of no interest.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "ceiling.h"
#include "interrupt.h"

#define BUFFER ((uint64_t)64 << 20)
#define COPY_BYTES ((uint64_t)8 << 30)	/* to copy at most, and for how long */
#define COPY_SECONDS 0.15
#define COPY_REQUEST ((uint64_t)4 << 20)
#define COPY_LANES 4
#define READ_BYTES ((uint64_t)1 << 30)	/* to read at most, and for how long */
#define READ_SECONDS 0.35
#define LOOK_SECONDS 0.005
#define LOOKS_MAX 256			/* more than there is time for */
#define WINDOW_SECONDS 0.05
#define WINDOW_BYTES ((uint64_t)64 << 20)
#define FILE_EXTENTS_MAX (READ_BYTES / BUFFER + 64)
#define LEAST_BYTES ((uint64_t)16 << 20)	/* what less takes is noise */

/* ---------------------------------------------------------------------------- measurement -- */

/* What a job had moved when it was looked at. */
struct look {
	double seconds;
	uint64_t bytes;
};

/*
 * The best rate of any stretch of WINDOW_SECONDS that moved enough to be counted in requests; or
 * of the whole, where there is none. The start of a job and a moment's trouble are not in it.
 */
static double best_rate(const struct look *looks, size_t count)
{
	const struct look *last = &looks[count - 1];
	double best = last->seconds > 0 ? (double)last->bytes / last->seconds : 0;

	for (size_t from = 0, to = 0; to < count; to++) {
		while (looks[to].seconds - looks[from + 1].seconds >= WINDOW_SECONDS)
			from++;

		double seconds = looks[to].seconds - looks[from].seconds;
		uint64_t bytes = looks[to].bytes - looks[from].bytes;

		if (seconds >= WINDOW_SECONDS && bytes >= WINDOW_BYTES &&
		    (double)bytes / seconds > best)
			best = (double)bytes / seconds;
	}
	return best;
}

/* Bytes per second of a job, watched for `seconds` at most; it is released. */
static int measure(struct pen_job *job, double seconds, double *rate)
{
	struct look looks[LOOKS_MAX] = { { 0, 0 } };
	struct pen_progress progress;
	size_t count = 1;
	int rc;

	do {
		pen_job_wait_for(job, LOOK_SECONDS);
		pen_job_poll(job, &progress);
		looks[count++] = (struct look){ progress.seconds, progress.bytes };
	} while (progress.state < PEN_DONE && progress.seconds < seconds && count < LOOKS_MAX &&
		 !interrupt_signal());
	pen_job_cancel(job);
	rc = pen_job_wait(job, NULL, NULL);
	if (interrupt_signal())
		return -ECANCELED;
	if (!rc || rc == -ECANCELED)
		*rate = best_rate(looks, count);
	return 0;
}

/* ------------------------------------------------------------------------------- the hops -- */

/* Zeros from staging memory to the GPU: nothing but the copies takes time. */
static int measure_copies(struct ceiling *ceiling, const struct ceiling_load *load)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_extent extents[COPY_BYTES / BUFFER];
	struct pen_object *zeros = NULL;
	size_t count = COPY_BYTES / BUFFER;
	struct pen_job *job;
	void *buffer = NULL;
	int rc = 0;

	/* Large copies from few threads: smaller ones, or more threads, were slower. */
	options.request_size = COPY_REQUEST;
	options.lanes = COPY_LANES;

	if (!pen_object_open("null:", PEN_READ, 0, &zeros, NULL) &&
	    !pen_device_alloc(load->device, BUFFER, &buffer, NULL)) {
		for (size_t i = 0; i < count; i++)
			extents[i] = (struct pen_extent){
				.object = zeros, .offset = i * BUFFER, .memory = buffer,
				.length = BUFFER,
			};
		if (!pen_job_start(PEN_READ, load->device, extents, count, &options, &job, NULL))
			rc = measure(job, COPY_SECONDS, &ceiling->copy_rate);
		pen_device_free(load->device, buffer, BUFFER, NULL);
	} else {
		ceiling->reason = "the GPU has no memory left to measure with";
	}
	pen_object_close(zeros);
	return rc;
}

static bool is_direct(const char *path)
{
	return !strncmp(path, "direct", 6) || !strncmp(path, "gds", 3) ||
	       !strncmp(path, "cufile", 6);
}

/* Add the ranges of a file that are read directly, cut to the buffer; returns the new count. */
static size_t add_direct(const struct pen_model_file *file, const struct pen_explanation *plan,
			 void *buffer, struct pen_extent *extents, size_t count, uint64_t *left)
{
	for (size_t i = 0; plan && i < plan->range_count; i++) {
		uint64_t at = plan->ranges[i].offset, end = at + plan->ranges[i].length;

		for (uint64_t piece; is_direct(plan->ranges[i].path) && at < end && *left &&
		     count < FILE_EXTENTS_MAX; at += piece) {
			piece = end - at < BUFFER ? end - at : BUFFER;
			piece = piece < *left ? piece : *left;
			extents[count++] = (struct pen_extent){
				.object = file->object, .offset = at, .memory = buffer,
				.length = piece,
			};
			*left -= piece;
		}
	}
	return count;
}

/* Direct reads of the same files into host memory: nothing but the store takes time. */
static int measure_store(struct ceiling *ceiling, const struct ceiling_load *load,
			 struct pen_device *host, struct pen_explanation **plans)
{
	struct pen_extent extents[FILE_EXTENTS_MAX];
	const struct pen_model_file *files;
	size_t file_count = pen_model_files(load->model, &files), count = 0;
	uint64_t left = READ_BYTES;
	struct pen_job *job;
	void *buffer;
	int rc = 0;

	if (pen_device_alloc(host, BUFFER, &buffer, NULL))
		return 0;
	for (size_t i = 0; i < file_count; i++)
		count = add_direct(&files[i], plans[i], buffer, extents, count, &left);
	if (!count)
		ceiling->reason = "what was read from the store is in the page cache by now";
	else if (!pen_job_start(PEN_READ, host, extents, count, NULL, &job, NULL))
		rc = measure(job, READ_SECONDS, &ceiling->store_rate);
	pen_device_free(host, buffer, BUFFER, NULL);
	return rc;
}

/* Whether a tensor begins where the page cache would be asked. */
static bool is_cached(const struct pen_tensor *tensor, const struct pen_explanation *plan)
{
	for (size_t i = 0; plan && i < plan->range_count; i++)
		if (tensor->offset - plan->ranges[i].offset < plan->ranges[i].length)
			return !is_direct(plan->ranges[i].path);
	return false;
}

/* Cached tensors again, to where they are already: neither memory nor pages are to be made. */
static int measure_cache(struct ceiling *ceiling, const struct ceiling_load *load,
			 struct pen_explanation **plans)
{
	struct pen_placement *again = calloc(load->count + 1, sizeof(again[0]));
	struct pen_job *job;
	uint64_t bytes = 0;
	size_t count = 0;
	int rc = 0;

	for (size_t i = 0; again && i < load->count && bytes < READ_BYTES; i++) {
		const struct pen_tensor *tensor = load->placements[i].tensor;

		if (!is_cached(tensor, plans[tensor->file]))
			continue;
		again[count] = load->placements[i];
		again[count++].memory = load->memory + (uintptr_t)load->placements[i].memory;
		bytes += tensor->bytes;
	}
	if (!bytes)
		ceiling->reason = "what was read from the page cache is no longer there";
	else if (!pen_load_start(load->model, load->device, again, count, NULL, &job, NULL))
		rc = measure(job, READ_SECONDS, &ceiling->cache_rate);
	free(again);
	return rc;
}

/* The hops that begin at the files, which must first be asked where their bytes are. */
static int measure_files(struct ceiling *ceiling, const struct ceiling_load *load, bool direct,
			 bool cached)
{
	const struct pen_model_file *files;
	size_t count = pen_model_files(load->model, &files);
	struct pen_explanation **plans = calloc(count + 1, sizeof(plans[0]));
	struct pen_device *host = NULL;
	int rc = 0;

	if (plans && !pen_device_open("host", &host, NULL)) {
		for (size_t i = 0; i < count; i++)
			if (pen_explain(files[i].object, host, NULL, &plans[i], NULL))
				plans[i] = NULL;
		if (direct)
			rc = measure_store(ceiling, load, host, plans);
		if (!rc && cached)
			rc = measure_cache(ceiling, load, plans);
	}
	for (size_t i = 0; plans && i < count; i++)
		pen_explain_free(plans[i]);
	pen_device_close(host);
	free(plans);
	return rc;
}

/* ---------------------------------------------------------------------------------- whole -- */

static void raise_to(double *seconds, uint64_t bytes, double rate)
{
	double needed = rate > 0 ? (double)bytes / rate : 0;

	if (needed > *seconds)
		*seconds = needed;
}

static const char *what_is_missing(const struct ceiling *ceiling, const struct ceiling_load *load,
				   uint64_t direct, uint64_t cached)
{
	if (ceiling->reason)
		return ceiling->reason;
	if (!load->on_host && !ceiling->copy_rate)
		return "copies to the GPU failed when they were to be measured";
	if (direct && !ceiling->store_rate)
		return "reads from the store failed when they were to be measured";
	if (cached && !ceiling->cache_rate)
		return "reads from the page cache failed when they were to be measured";
	return NULL;
}

int ceiling_measure(struct ceiling *ceiling, const struct ceiling_load *load)
{
	const struct pen_report *report = load->report;
	uint64_t direct = 0, cached = 0;
	int rc = 0;

	*ceiling = (struct ceiling){ .seconds = 0 };
	if (report->bytes < LEAST_BYTES) {
		ceiling->reason = "too small to measure";
		return 0;
	}
	for (uint32_t i = 0; i < report->path_count; i++) {
		if (is_direct(report->paths[i].path))
			direct += report->paths[i].bytes;
		else
			cached += report->paths[i].bytes;
	}
	/* What is hardly anything is in nobody's way: the ends of a cold file are often cached. */
	direct = direct < report->bytes / 50 ? 0 : direct;
	cached = cached < report->bytes / 50 ? 0 : cached;
	cached = load->on_host ? cached : 0;	/* a GPU's copies are slower than what feeds them */
	if (!load->on_host && report->bytes)
		rc = measure_copies(ceiling, load);
	if (!rc && (direct || cached))
		rc = measure_files(ceiling, load, direct, cached);
	/* A hop that should be in the way and could not be measured leaves the whole unknown. */
	if (!rc)
		ceiling->reason = what_is_missing(ceiling, load, direct, cached);
	if (rc || ceiling->reason)
		return rc;
	raise_to(&ceiling->seconds, report->bytes, ceiling->copy_rate);
	raise_to(&ceiling->seconds, direct, ceiling->store_rate);
	raise_to(&ceiling->seconds, cached, ceiling->cache_rate);
	/* What has been done can be done: a store that was slower just now is no ceiling. */
	ceiling->seconds = fmin(ceiling->seconds, report->seconds - report->setup_seconds);
	return 0;
}
