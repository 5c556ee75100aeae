/* SPDX-License-Identifier: MIT */
/*
 * penstock load: the tensors of a model into the memory of a device, by one job into one
 * allocation that the job makes itself, as soon as the device is up. What it took is told beside
 * what it could have taken here at best (ceiling.h).
 *
 * With --repeat the same is done again and again, into the same memory: a GPU that has to clean
 * what was just freed before it can be had again is slower meanwhile. What is told in detail is the
 * run whose time is in the middle.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/hash.h"
#include "base/text.h"
#include "ceiling.h"
#include "commands.h"
#include "device.h"
#include "evict.h"
#include "interrupt.h"
#include "keys.h"
#include "model.h"
#include "progress.h"
#include "report.h"
#include "runs.h"
#include "seconds.h"
#include "watch.h"

#define CHUNK ((size_t)4 << 20)		/* to read memory back by */

struct settings {
	struct pen_options engine;
	const char *device;	/* NULL: not given */
	struct option_list keys;
	uint32_t repeat;
	bool drop_cache, hash, json, quiet, no_ceiling;
};

#define AT(field) .where = offsetof(struct settings, field)

static const struct option_entry load_options[] = {
	OPTIONS_DEVICE("tensors"),
	{ "keys", 'k', OPTION_LIST, "GLOB", AT(keys),
	  .help = "Only tensors of such names; can be given more than once" },
	OPTIONS_REPEAT("Load"),
	{ "drop-cache", 0, OPTION_FLAG, AT(drop_cache),
	  .help = "Evict the files from the page cache before each load" },
	{ "hash", 0, OPTION_FLAG, AT(hash),
	  .help = "Read the tensors back and print the XXH3-128 of each" },
	OPTIONS_TRANSFER,
	OPTIONS_ENGINE,
	{ "no-ceiling", 0, OPTION_FLAG, AT(no_ceiling),
	  .help = "Do not measure how fast it could be" },
	{ "json", 0, OPTION_FLAG, AT(json), .help = "Report as one JSON object" },
	{ "quiet", 'q', OPTION_FLAG, AT(quiet),
	  .help = "No progress bar and no report for people" },
	{ "help", 'h', OPTION_HELP, .help = "Show this" },
	{ .name = NULL },
};

struct load {
	struct settings set;
	char *const *paths;			/* ends with NULL */
	const char *path;			/* what to call them */
	char label[MODEL_LABEL_MAX];
	struct pen_device *device;
	char why[DEVICE_REASON_MAX];		/* it is the host, where nobody asked for that */
	struct pen_model *model;
	const struct pen_tensor **tensors;	/* those to load */
	size_t count;
	struct pen_placement *placements;
	struct pen_placement *placed;		/* the same, once there is memory: addresses */
	uint64_t bytes, total;			/* of the tensors; of the memory they lie in */
	uint64_t stored;			/* of the tensors in their files */
	unsigned char *memory;
	struct pen_report *runs;		/* of each load, as they came */
	const struct pen_report *median;	/* one of them */
	double open_seconds;
	uint64_t anonymous_before, anonymous_after;
	uint64_t kept;				/* most that --drop-cache could not evict */
	char (*hashes)[HASH_TEXT_SIZE];
	struct ceiling ceiling;
	struct warming warming;
	struct progress progress;
};

static bool on_host(const struct load *load)
{
	return !strcmp(pen_device_name(load->device), "host");
}

/* -------------------------------------------------------------------------------- opening -- */

/* The hint, and these words after it. */
static void add_hint(struct pen_error *err, const char *words)
{
	size_t used = strlen(err->hint);

	text_copy(err->hint + used, sizeof(err->hint) - used, words);
}

/* For those who have no GPU, or not that one, but asked for it. */
static void suggest_host(struct pen_error *err)
{
	add_hint(err, err->hint[0] ? ". " : "");
	add_hint(err, "Use --device host to load into host memory");
}

static int place_tensors(struct load *load, struct pen_error *err)
{
	load->placements = calloc(load->count + 1, sizeof(load->placements[0]));
	load->hashes = calloc(load->count + 1, sizeof(load->hashes[0]));
	load->runs = calloc(load->set.repeat, sizeof(load->runs[0]));
	load->placed = calloc(load->count + 1, sizeof(load->placed[0]));
	if (!load->placements || !load->placed || !load->hashes || !load->runs)
		return error_sys(err, -ENOMEM, "load", load->path, -1);
	for (size_t i = 0; i < load->count; i++) {
		load->placements[i].tensor = load->tensors[i];
		load->bytes += load->tensors[i]->bytes;
		load->stored += load->tensors[i]->coded ? load->tensors[i]->coded
							: load->tensors[i]->bytes;
	}
	return pen_placement_layout(load->placements, load->count, &load->total, err);
}

static int open_all(struct load *load, struct pen_error *err)
{
	double start = seconds_now();
	/* The device first: it goes on starting while headers are read. But where both cannot be
	 * had, the model is what the user has to do with. */
	struct pen_error no_device;
	int without = device_open(load->set.device, false, &load->device, load->why, &no_device);
	int rc = model_open(load->paths, &load->model, err);

	if (!rc && without) {
		*err = no_device;
		suggest_host(err);
		rc = without;
	}
	if (!rc)
		rc = keys_select(&load->set.keys, load->model, load->path, &load->tensors,
				 &load->count, err);
	if (!rc)
		rc = place_tensors(load, err);
	load->open_seconds = seconds_now() - start;
	return rc;
}

/* ----------------------------------------------------------------------------- page cache -- */

static int drop_cache(struct load *load, struct pen_error *err)
{
	const struct pen_model_file *files;
	size_t count = pen_model_files(load->model, &files);
	uint64_t kept = 0;
	int rc = 0;

	for (size_t i = 0; !rc && i < count; i++)
		rc = evict(files[i].path, files[i].object, &kept, err);
	if (kept > load->kept)
		load->kept = kept;
	return rc;
}

/* -------------------------------------------------------------------------------- loading -- */

/* Memory of this process that no file stands behind; 0 where the system does not say. */
static uint64_t anonymous_memory(void)
{
	FILE *file = fopen("/proc/self/status", "re");
	unsigned long long kib = 0;
	char line[128];

	while (file && fgets(line, sizeof(line), file))
		if (sscanf(line, "RssAnon: %llu kB", &kib) == 1)
			break;
	if (file)
		fclose(file);
	return (uint64_t)kib << 10;
}

static void free_memory(struct load *load)
{
	if (load->memory)
		pen_device_free(load->device, load->memory, load->total, NULL);
	load->memory = NULL;
}

static int load_once(struct load *load, struct pen_report *report, struct pen_error *err)
{
	struct pen_options options = load->set.engine;
	bool last = report == &load->runs[load->set.repeat - 1];
	struct pen_job *job;
	uint64_t anonymous;
	int rc;

	/* What comes after a load comes after the last: the next would be in its way. */
	if (!last && options.cache == PEN_CACHE_AFTER)
		options.cache = PEN_CACHE_AUTO;
	if (load->set.drop_cache) {
		rc = drop_cache(load, err);
		if (rc)
			return rc;
	}
	if (load->memory) {
		for (size_t i = 0; i < load->count; i++) {
			load->placed[i] = load->placements[i];
			load->placed[i].memory =
				load->memory + (uintptr_t)load->placements[i].memory;
		}
	} else {
		options.allocate = load->total;
		options.allocated = (void **)&load->memory;
	}
	rc = pen_load_start(load->model, load->device,
			    load->memory ? load->placed : load->placements, load->count, &options,
			    &job, err);
	if (rc)
		return rc;
	progress_start(&load->progress, "loading", load->stored);
	watch_jobs(&job, 1, &load->progress, 0, 1);
	progress_end(&load->progress);
	report->size = sizeof(*report);
	rc = pen_job_wait(job, report, err);
	anonymous = anonymous_memory();
	if (anonymous > load->anonymous_after)
		load->anonymous_after = anonymous;
	return rc;
}

/* Whether a GPU works is known when it is up, which the first load does not wait for. */
static int load_first(struct load *load, struct pen_error *err)
{
	int rc = load_once(load, &load->runs[0], err);

	if (!rc || rc == -ECANCELED || !pen_device_ready(load->device, NULL))
		return rc;
	if (!load->set.device && device_fall_back(&load->device, load->why))
		return load_once(load, &load->runs[0], err);
	suggest_host(err);
	return rc;
}

static int load_all(struct load *load, struct pen_error *err)
{
	int rc = load_first(load, err);

	for (uint32_t i = 1; !rc && i < load->set.repeat; i++)
		rc = interrupt_signal() ? -ECANCELED : load_once(load, &load->runs[i], err);
	/* What the host refuses, memory for instance, may be what was meant for a GPU. */
	if (rc && load->why[0]) {
		add_hint(err, err->hint[0] ? ". " : "");
		add_hint(err, "It went to the host because cuda:0 cannot be used: ");
		add_hint(err, load->why);
	}
	if (!rc)
		load->median = &load->runs[runs_median(load->runs, load->set.repeat)];
	return rc;
}

/* -------------------------------------------------------------------------------- hashing -- */

static int hash_tensor(struct load *load, size_t number, unsigned char *chunk, uint64_t before,
		       struct pen_error *err)
{
	const struct pen_placement *placement = &load->placements[number];
	uint64_t bytes = placement->tensor->bytes;
	struct hash *hash = hash_new();
	int rc = hash ? 0 : error_sys(err, -ENOMEM, "hash", placement->tensor->name, -1);

	for (uint64_t at = 0; !rc && at < bytes; at += CHUNK) {
		size_t piece = bytes - at < CHUNK ? (size_t)(bytes - at) : CHUNK;

		rc = pen_device_get(load->device, chunk,
				    load->memory + (uintptr_t)placement->memory + at, piece, err);
		if (!rc)
			hash_add(hash, chunk, piece);
		if (!rc && interrupt_signal())
			rc = -ECANCELED;
		progress_show(&load->progress, before + at + piece);
	}
	if (!rc)
		hash_text(hash, load->hashes[number]);
	hash_free(hash);
	return rc;
}

static int hash_all(struct load *load, struct pen_error *err)
{
	unsigned char *chunk = malloc(CHUNK);
	uint64_t before = 0;
	int rc = chunk ? 0 : error_sys(err, -ENOMEM, "hash", load->path, -1);

	progress_start(&load->progress, "hashing", load->bytes);
	for (size_t i = 0; !rc && i < load->count; i++) {
		rc = hash_tensor(load, i, chunk, before, err);
		before += load->tensors[i]->bytes;
	}
	progress_end(&load->progress);
	free(chunk);
	return rc;
}

/* ---------------------------------------------------------------------------- the ceiling -- */

static int measure_ceiling(struct load *load)
{
	struct ceiling_load done = {
		.model = load->model,
		.device = load->device,
		.on_host = on_host(load),
		.placements = load->placements,
		.count = load->count,
		.memory = load->memory,
		.report = load->median,
	};

	return ceiling_measure(&load->ceiling, &done);
}

/* The part of the load's time after the set-up that the ceiling would have needed. */
static double share(const struct load *load)
{
	double spent = load->median->seconds - load->median->setup_seconds;

	return spent > 0 ? load->ceiling.seconds / spent : 0;
}

/* Tensors on the host are anonymous memory themselves and do not count. */
static uint64_t anonymous_growth(const struct load *load)
{
	uint64_t before = load->anonymous_before + (on_host(load) ? load->total : 0);

	return load->anonymous_after > before ? load->anonymous_after - before : 0;
}

/* ----------------------------------------------------------------------------------- JSON -- */

static json_t *rate_json(double rate)
{
	return rate > 0 ? report_real(rate / 1e9) : json_null();
}

static json_t *ceiling_json(const struct load *load)
{
	const struct ceiling *ceiling = &load->ceiling;
	json_t *object;

	if (!(ceiling->seconds > 0))
		return json_null();
	object = json_object();
	json_object_set_new(object, "seconds", report_real(ceiling->seconds));
	json_object_set_new(object, "share", report_real(share(load)));
	json_object_set_new(object, "copy_gb_per_s", rate_json(ceiling->copy_rate));
	json_object_set_new(object, "store_gb_per_s", rate_json(ceiling->store_rate));
	json_object_set_new(object, "cache_gb_per_s", rate_json(ceiling->cache_rate));
	return object;
}

static json_t *hashes_json(const struct load *load)
{
	json_t *list = json_array();

	for (size_t i = 0; i < load->count; i++) {
		json_t *entry = json_object();

		json_object_set_new(entry, "name", report_text_bytes(load->tensors[i]->name,
							     load->tensors[i]->name_length));
		json_object_set_new(entry, "hash", json_string(load->hashes[i]));
		json_array_append_new(list, entry);
	}
	return list;
}

static void print_json(const struct load *load)
{
	const struct pen_report *run = load->median;
	const struct pen_model_file *files;
	json_t *object = json_object();

	json_object_set_new(object, "model", report_text(load->path));
	json_object_set_new(object, "transfer",
			    json_string(pen_transfer_name(load->set.engine.transfer)));
	json_object_set_new(object, "files", report_number(pen_model_files(load->model, &files)));
	json_object_set_new(object, "tensors", report_number(load->count));
	report_job_json(object, run);
	json_object_set_new(object, "delivered_bytes", report_number(run->delivered_bytes));
	json_object_set_new(object, "coded_bytes", report_number(run->coded_bytes));
	json_object_set_new(object, "core_decoded_bytes",
			    report_number(run->core_decoded_bytes));
	json_object_set_new(object, "decode_seconds", report_real(run->decode_seconds));
	json_object_set_new(object, "device_staging_bytes",
			    report_number(run->device_staging_bytes));
	if (load->why[0])
		json_object_set_new(object, "device_reason", report_text(load->why));
	json_object_set_new(object, "paths", report_paths(json_array(), "read", run->paths,
							  run->path_count, false));
	report_cache_json(object, &load->warming);
	json_object_set_new(object, "open_seconds", report_real(load->open_seconds));
	json_object_set_new(object, "runs", runs_json(load->runs, load->set.repeat));
	json_object_set_new(object, "ceiling", ceiling_json(load));
	if (load->ceiling.reason)
		json_object_set_new(object, "ceiling_reason", report_text(load->ceiling.reason));
	json_object_set_new(object, "memory_bytes", report_number(load->total));
	json_object_set_new(object, "anonymous_bytes", report_number(anonymous_growth(load)));
	if (load->set.drop_cache)
		json_object_set_new(object, "not_evicted_bytes", report_number(load->kept));
	if (load->set.hash)
		json_object_set_new(object, "hashes", hashes_json(load));
	json_object_set_new(object, "warnings", report_warnings(load->model));
	report_json(object);
}

/* --------------------------------------------------------------------------------- people -- */

static void print_hashes(const struct load *load)
{
	for (size_t i = 0; i < load->count; i++) {
		printf("%s  ", load->hashes[i]);
		report_name_bytes(load->tensors[i]->name, load->tensors[i]->name_length, 0);
		putchar('\n');
	}
}

static void print_ceiling(const struct load *load)
{
	const struct ceiling *ceiling = &load->ceiling;
	const char *before = " (";
	char seconds[REPORT_BYTES_MAX];

	if (ceiling->reason)
		printf("  ceiling: not known: %s\n", ceiling->reason);
	if (!(ceiling->seconds > 0))
		return;
	printf("  ceiling: %.0f %% of it%s; it is ", 100 * share(load),
	       load->median->setup_seconds >= 0.01 ? ", after the setup" : "");
	if (ceiling->seconds >= 0.01)
		printf("%.3f s", ceiling->seconds);
	else
		printf("%s", report_seconds(ceiling->seconds, seconds, sizeof(seconds)));
	if (ceiling->copy_rate > 0) {
		printf("%spinned memory to the GPU: %.2f GB/s", before, ceiling->copy_rate / 1e9);
		before = ", ";
	}
	if (ceiling->store_rate > 0) {
		printf("%sdirect reads: %.2f GB/s", before, ceiling->store_rate / 1e9);
		before = ", ";
	}
	if (ceiling->cache_rate > 0)
		printf("%spage cache to memory that is there: %.2f GB/s", before,
		       ceiling->cache_rate / 1e9);
	printf(")\n");
}

/* What coded bytes became, and who did it. */
static void print_decoded(const struct load *load)
{
	const struct pen_report *run = load->median;
	char coded[REPORT_BYTES_MAX], delivered[REPORT_BYTES_MAX], rate[REPORT_BYTES_MAX];
	char seconds[REPORT_BYTES_MAX], by_cores[REPORT_BYTES_MAX];

	if (!run->coded_bytes)
		return;
	printf("  decoded: %s of it were coded, %s were delivered, %s; ",
	       report_bytes(run->coded_bytes, coded, sizeof(coded)),
	       report_bytes(run->delivered_bytes, delivered, sizeof(delivered)),
	       report_rate(run->seconds > 0 ? (double)run->delivered_bytes / run->seconds : 0, rate,
			   sizeof(rate)));
	report_seconds(run->decode_seconds, seconds, sizeof(seconds));
	if (run->core_decoded_bytes == run->coded_bytes)
		printf("by cores, in %s of their time\n", seconds);
	else if (run->core_decoded_bytes)
		printf("by the GPU, and %s by cores, in %s of their time\n",
		       report_bytes(run->core_decoded_bytes, by_cores, sizeof(by_cores)), seconds);
	else
		printf("by the GPU, in the place of copies\n");
}

static void print_memory(const struct load *load)
{
	char total[TEXT_SIZE_MAX], padding[TEXT_SIZE_MAX], anonymous[TEXT_SIZE_MAX];

	printf("  memory: %s of %s, %s of it padding; anonymous memory of the process grew by %s"
	       "%s\n", text_from_size(load->total, total, sizeof(total)), load->median->device,
	       text_from_size(load->total - load->bytes, padding, sizeof(padding)),
	       text_from_size(anonymous_growth(load), anonymous, sizeof(anonymous)),
	       on_host(load) ? " besides" : "");
}

static void print_text(const struct load *load)
{
	const struct pen_model_file *files;
	size_t count = pen_model_files(load->model, &files);

	printf("%zu %s of %zu %s: ", load->count, load->count == 1 ? "tensor" : "tensors", count,
	       count == 1 ? "file" : "files");
	report_job_text(load->median, load->open_seconds);
	if (load->why[0]) {
		printf("  device: ");
		device_print(load->median->device, load->why);
		putchar('\n');
	}
	report_paths_text(load->median, NULL, load->median);
	report_cache_text(&load->warming);
	print_decoded(load);
	print_ceiling(load);
	print_memory(load);
	runs_print(load->runs, load->set.repeat);
	evict_print_kept(load->kept);
	report_warnings_text(load->model);
}

/* ---------------------------------------------------------------------------- the command -- */

static int run(struct load *load, struct pen_error *err)
{
	int rc;

	load->anonymous_before = anonymous_memory();
	rc = open_all(load, err);
	if (!rc)
		rc = load_all(load, err);
	if (!rc)
		rc = warming_finish(&load->warming, &load->runs[load->set.repeat - 1],
				    &load->progress);
	if (!rc && load->set.hash)
		rc = hash_all(load, err);
	if (!rc && !load->set.no_ceiling)
		rc = measure_ceiling(load);
	return rc;
}

static void print_report(const struct load *load)
{
	if (load->set.json) {
		print_json(load);
		return;
	}
	if (load->set.hash)
		print_hashes(load);
	if (!load->set.quiet)
		print_text(load);
}

static void close_all(struct load *load)
{
	free_memory(load);
	pen_model_close(load->model);
	pen_device_close(load->device);
	free(load->tensors);
	free(load->placements);
	free(load->placed);
	free(load->runs);
	free(load->hashes);
}

static int run_load(int argc, char **argv)
{
	struct load load = {
		.set = { .engine = PEN_OPTIONS_INIT, .repeat = 1 },
	};
	struct pen_error err;
	int status = STATUS_FAILURE;
	int rc = options_parse(&command_load, argc, argv, &load.set, &err);

	if (!rc)
		rc = options_check(&load.set.engine, &err);
	if (rc) {
		if (rc < 0)
			report_error(&err, load.set.json);
		return rc < 0 ? STATUS_USAGE : STATUS_OK;
	}
	load.paths = argv;
	load.path = model_label(argv, load.label);
	interrupt_init();
	progress_init(&load.progress, !load.set.quiet);
	rc = run(&load, &err);
	if (rc == -ECANCELED && interrupt_signal()) {
		status = 128 + interrupt_signal();
		error_set(&err, rc, "load", load.path, -1, "interrupted");
		error_hint(&err, "Run it again; nothing is left of it");
	}
	if (rc)
		report_error(&err, load.set.json);
	else
		print_report(&load);
	close_all(&load);
	return rc ? status : STATUS_OK;
}

const struct command command_load = {
	.name = "load",
	.operands = "MODEL",
	.operand_count = 1,
	.more_operands = true,
	.summary = "load the tensors of a model into the memory of a GPU",
	.description = "Load all tensors of MODEL - a safetensors file, a folder of them, an "
		       "index, or several files - into the memory of a device, and say how fast "
		       "that was, how fast it could be here, which paths the bytes took and why.",
	.options = load_options,
	.run = run_load,
};
