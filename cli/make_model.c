/* SPDX-License-Identifier: MIT */
/*
 * penstock make-model: a checkpoint with made-up numbers in it, to measure with.
 *
 * Each file is a stream of bytes: its header, then its tensors. It passes through two windows of
 * memory that take turns; while window i is written by a job, threads fill window i + 1. What a
 * byte is depends on its tensor, its place and the seed alone, so threads and windows leave no
 * trace in the result.
 *
 * All files are written before the first of them gets its name: what fails or is interrupted
 * before that leaves nothing behind. A new folder is made under a hidden name and gets its own by
 * one rename, so it is never there in part. In a folder that is there already the files get their
 * names one after the other; what each replaces is kept until all have theirs, and is put back if
 * one cannot.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/error.h"
#include "base/text.h"
#include "commands.h"
#include "interrupt.h"
#include "normal.h"
#include "progress.h"
#include "report.h"
#include "seconds.h"
#include "spec.h"
#include "stage.h"
#include "watch.h"

#define WINDOW ((uint64_t)64 << 20)
#define UNIT ((uint64_t)256 << 10)		/* what a thread fills at a time */
#define JOB_MEMORY ((uint64_t)32 << 20)		/* what a job may pin besides */
#define THREADS_MAX 16
#define REMAINS_MAX 1000			/* files of another model that are counted */
#define REMAINS_TOLD 5

struct settings {
	uint32_t seed;
	bool force, json, quiet;
};

#define AT(field) .where = offsetof(struct settings, field)

static const struct option_entry make_model_options[] = {
	{ "seed", 0, OPTION_NUMBER, "N", AT(seed), .max = UINT32_MAX,
	  .help = "Other numbers for each; the same for the same" },
	{ "force", 0, OPTION_FLAG, AT(force),
	  .help = "Write into a folder that is not empty, and replace files of the same names" },
	{ "json", 0, OPTION_FLAG, AT(json), .help = "Report as one JSON object" },
	{ "quiet", 'q', OPTION_FLAG, AT(quiet),
	  .help = "No progress bar and no report for people" },
	{ "help", 'h', OPTION_HELP, .help = "Show this" },
	{ .name = NULL },
};

struct made_file {
	struct pen_object *object;
	char *path;
	bool replaces;		/* something of the same name, */
	bool kept;		/* which is in the stage for now */
};

struct maker {
	struct settings set;
	const char *folder;		/* as the user names it */
	struct stage stage;		/* what becomes the folder, or keeps what it had */
	bool new_folder;
	struct spec spec;
	uint64_t *keys;			/* of the tensors' numbers */
	struct pen_device *host;
	unsigned char *windows[2];
	struct made_file *files;	/* those of the model, then config.json and the index */
	size_t file_count;
	size_t mixed;			/* new files in an old folder that could not be undone */
	struct progress progress;
	struct pen_report report;
	double seconds, commit_seconds;
};

/* -------------------------------------------------------------------------------- filling -- */

/* Bytes of a file, and the window that they pass through. */
struct piece {
	size_t file;
	uint64_t offset, length;
	unsigned char *memory;
};

/* A piece that is being filled, and the threads at it. */
struct filling {
	const struct maker *maker;
	struct piece piece;
	_Atomic uint64_t next;	/* the first byte that nobody has taken on yet */
	pthread_t threads[THREADS_MAX];
	int thread_count;
};

static enum normal_kind kind_of(int dtype)
{
	switch (dtype) {
	case PEN_BF16:
		return NORMAL_BF16;
	case PEN_F32:
		return NORMAL_F32;
	case PEN_BOOL:
		return NORMAL_BOOL;
	default:
		return NORMAL_BITS;
	}
}

/* The first tensor of the file that ends behind `offset`. */
static size_t find_tensor(const struct spec *spec, const struct spec_file *file, uint64_t offset)
{
	size_t low = file->first, high = file->first + file->count;

	while (low < high) {
		size_t middle = low + (high - low) / 2;

		if (spec->tensors[middle].offset + spec->tensors[middle].bytes > offset)
			high = middle;
		else
			low = middle + 1;
	}
	return low;
}

/* Bytes of the file from `at` to `end`. */
static void fill_unit(const struct maker *maker, size_t number, uint64_t at, uint64_t end,
		      unsigned char *to)
{
	const struct spec *spec = &maker->spec;
	const struct spec_file *file = &spec->files[number];

	if (at < file->header_size) {
		uint64_t length = (end < file->header_size ? end : file->header_size) - at;

		memcpy(to, file->header + at, length);
		to += length;
		at += length;
	}
	for (size_t i = find_tensor(spec, file, at); at < end; i++) {
		const struct spec_tensor *tensor = &spec->tensors[i];
		uint64_t stop = tensor->offset + tensor->bytes;
		uint64_t length = (end < stop ? end : stop) - at;

		normal_fill(kind_of(tensor->dtype), maker->keys[i], at - tensor->offset, to,
			    length);
		to += length;
		at += length;
	}
}

static void *fill_units(void *argument)
{
	struct filling *filling = argument;
	const struct piece *piece = &filling->piece;
	uint64_t from;

	while ((from = atomic_fetch_add(&filling->next, UNIT)) < piece->length) {
		uint64_t left = piece->length - from;

		fill_unit(filling->maker, piece->file, piece->offset + from,
			  piece->offset + from + (left < UNIT ? left : UNIT), piece->memory + from);
	}
	return NULL;
}

static int cores(void)
{
	cpu_set_t set;
	int count = sched_getaffinity(0, sizeof(set), &set) ? 1 : CPU_COUNT(&set);

	return count < THREADS_MAX ? count : THREADS_MAX;
}

/* With fewer threads, or none, where the system has no more to give. */
static void start_filling(struct filling *filling, const struct maker *maker,
			  const struct piece *piece)
{
	int wanted = cores();

	filling->maker = maker;
	filling->piece = *piece;
	filling->next = 0;
	filling->thread_count = 0;
	while (filling->thread_count < wanted &&
	       !pthread_create(&filling->threads[filling->thread_count], NULL, fill_units, filling))
		filling->thread_count++;
}

static void finish_filling(struct filling *filling)
{
	fill_units(filling);	/* what is left, or all of it */
	while (filling->thread_count)
		pthread_join(filling->threads[--filling->thread_count], NULL);
}

/* -------------------------------------------------------------------------------- writing -- */

/* The piece behind this one, in the same file or the next; false: there is none. */
static bool next_piece(const struct maker *maker, struct piece *piece)
{
	const struct spec *spec = &maker->spec;
	uint64_t left;

	piece->offset += piece->length;
	if (piece->offset == spec->files[piece->file].size) {
		piece->file++;
		piece->offset = 0;
	}
	if (piece->file == spec->file_count)
		return false;
	left = spec->files[piece->file].size - piece->offset;
	piece->length = left < WINDOW ? left : WINDOW;
	piece->memory = maker->windows[piece->memory == maker->windows[0]];
	return true;
}

/* Write one piece while the next, where there is one, is filled. */
static int step(struct maker *maker, const struct piece *now, const struct piece *next,
		struct pen_error *err)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_extent extent = {
		.object = maker->files[now->file].object,
		.offset = now->offset,
		.memory = now->memory,
		.length = now->length,
	};
	struct filling filling;
	struct pen_job *job;
	int rc;

	options.memory_limit = JOB_MEMORY;
	rc = pen_job_start(PEN_WRITE, maker->host, &extent, 1, &options, &job, err);
	if (rc)
		return rc;
	if (next)
		start_filling(&filling, maker, next);
	watch_jobs(&job, 1, &maker->progress, maker->report.bytes, 1);
	if (next)
		finish_filling(&filling);
	watch_finish(job, &maker->report, &rc, err);
	return rc;
}

static int write_files(struct maker *maker, struct pen_error *err)
{
	struct piece now = { .file = 0 }, next;
	struct filling first;
	uint64_t total = 0;
	bool more;
	int rc = 0;

	for (size_t i = 0; i < maker->spec.file_count; i++)
		total += maker->spec.files[i].size;
	progress_start(&maker->progress, "writing", total);
	more = next_piece(maker, &now);
	start_filling(&first, maker, &now);
	finish_filling(&first);
	while (!rc && more) {
		next = now;
		more = next_piece(maker, &next);
		rc = interrupt_signal() ? -ECANCELED : step(maker, &now, more ? &next : NULL, err);
		now = next;
	}
	progress_end(&maker->progress);
	return rc;
}

/* -------------------------------------------------------------------------------- objects -- */

static int open_object(struct maker *maker, const char *name, uint64_t size, struct pen_error *err)
{
	struct made_file *file = &maker->files[maker->file_count];
	int rc;

	if (asprintf(&file->path, "%s/%s", maker->new_folder ? maker->stage.path : maker->folder,
		     name) < 0) {
		file->path = NULL;
		return error_sys(err, -ENOMEM, "open", name, -1);
	}
	rc = pen_object_open(file->path, PEN_WRITE, size, &file->object, err);
	if (rc) {
		free(file->path);
		return rc;
	}
	maker->file_count++;
	return 0;
}

/* A small file: its name and all of its text; NULL: there is none. */
static int open_text(struct maker *maker, const char *name, const char *text,
		     struct pen_error *err)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_extent extent = {
		.memory = (void *)(uintptr_t)text,
		.length = text ? strlen(text) : 0,
	};
	int rc;

	if (!text)
		return 0;
	rc = open_object(maker, name, extent.length, err);
	if (rc)
		return rc;
	extent.object = maker->files[maker->file_count - 1].object;
	options.memory_limit = JOB_MEMORY;
	return pen_transfer(PEN_WRITE, maker->host, &extent, 1, &options, NULL, err);
}

/* All of them, so that a disk too small is known before anything is written. */
static int open_objects(struct maker *maker, struct pen_error *err)
{
	const struct spec *spec = &maker->spec;
	int rc = pen_device_open("host", &maker->host, err);

	maker->files = calloc(spec->file_count + 2, sizeof(maker->files[0]));
	maker->keys = calloc(spec->tensor_count + 1, sizeof(maker->keys[0]));
	if (!rc && (!maker->files || !maker->keys))
		rc = error_sys(err, -ENOMEM, "make", maker->folder, -1);
	for (size_t i = 0; !rc && i < spec->tensor_count; i++)
		maker->keys[i] = normal_key(spec->tensors[i].name, maker->set.seed);
	for (int i = 0; !rc && i < 2; i++)
		rc = pen_device_alloc(maker->host, WINDOW, (void **)&maker->windows[i], err);
	for (size_t i = 0; !rc && i < spec->file_count; i++)
		rc = open_object(maker, spec->files[i].name, spec->files[i].size, err);
	if (!rc)
		rc = open_text(maker, "config.json", spec->config, err);
	if (!rc)
		rc = open_text(maker, "model.safetensors.index.json", spec->index, err);
	return rc;
}

static void close_objects(struct maker *maker)
{
	for (size_t i = 0; i < maker->file_count; i++) {
		pen_object_close(maker->files[i].object);
		free(maker->files[i].path);
	}
	for (int i = 0; i < 2; i++)
		if (maker->windows[i])
			pen_device_free(maker->host, maker->windows[i], WINDOW, NULL);
	pen_device_close(maker->host);
	free(maker->files);
	free(maker->keys);
	stage_close(&maker->stage);
}

/* ------------------------------------------------------------------------------ all at once -- */

/* Where what file `number` replaces is kept meanwhile. */
static char *kept_path(const struct maker *maker, size_t number)
{
	char *path;

	return asprintf(&path, "%s/%zu", maker->stage.path, number) < 0 ? NULL : path;
}

static void keep_old(struct maker *maker, size_t number)
{
	struct made_file *file = &maker->files[number];
	char *real = realpath(file->path, NULL), *kept = kept_path(maker, number);

	/* What has no file system with links, or lies on another one, cannot be kept. */
	file->replaces = real != NULL;
	file->kept = real && kept && !link(real, kept);
	free(real);
	free(kept);
}

/* Undo what was committed of the first `count` files; returns how many could not be undone. */
static size_t restore(struct maker *maker, size_t count)
{
	size_t left = 0;

	for (size_t i = 0; i < count; i++) {
		struct made_file *file = &maker->files[i];
		char *real = realpath(file->path, NULL), *kept = kept_path(maker, i);

		if (file->kept)
			left += !real || !kept || rename(kept, real);
		else if (file->replaces || (unlink(file->path) && errno != ENOENT))
			left++;
		free(real);
		free(kept);
	}
	stage_flush(maker->folder);
	return left;
}

static int commit_files(struct maker *maker, struct pen_error *err)
{
	size_t tried = 0;
	int rc = 0;

	while (!rc && tried < maker->file_count) {
		if (interrupt_signal()) {
			rc = -ECANCELED;
			break;
		}
		if (!maker->new_folder)
			keep_old(maker, tried);
		rc = pen_object_commit(maker->files[tried++].object, err);
	}
	if (rc && !maker->new_folder)
		maker->mixed = restore(maker, tried);
	return rc;
}

static int commit(struct maker *maker, struct pen_error *err)
{
	double start = seconds_now();
	int rc = commit_files(maker, err);

	if (!rc && maker->new_folder)
		rc = stage_publish(&maker->stage, maker->folder, err);
	maker->commit_seconds = seconds_now() - start;
	return rc;
}

/* --------------------------------------------------------------------------------- folder -- */

/* A file that would be taken for a part of the model although it is none. */
static bool in_the_way(const struct spec *spec, const char *name)
{
	if (text_ends_with(name, ".safetensors.index.json"))
		return !spec->index || strcmp(name, "model.safetensors.index.json") != 0;
	if (!text_ends_with(name, ".safetensors"))
		return false;
	for (size_t i = 0; i < spec->file_count; i++)
		if (!strcmp(name, spec->files[i].name))
			return false;
	return true;
}

static int by_text(const void *left, const void *right)
{
	return strcmp(*(char *const *)left, *(char *const *)right);
}

/* All that is in the way, as far as there is room for it; the names are sorted and freed. */
static int tell_remains(const struct maker *maker, char **names, size_t count,
			struct pen_error *err)
{
	char list[sizeof(err->message) - 60];
	size_t used = 0;

	qsort(names, count, sizeof(names[0]), by_text);
	for (size_t i = 0; i < count && i < REMAINS_TOLD; i++)
		used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%.36s",
					 i ? ", " : "", names[i]);
	if (count > REMAINS_TOLD)
		snprintf(list + used, sizeof(list) - used, " and %zu more", count - REMAINS_TOLD);
	for (size_t i = 0; i < count; i++)
		free(names[i]);
	error_set(err, -EEXIST, "write to", maker->folder, -1,
		  "%s would be mixed with the new model", list);
	error_hint(err, "Remove what is left of the other model first");
	return -EEXIST;
}

static int check_folder(const struct maker *maker, DIR *folder, struct pen_error *err)
{
	char *remains[REMAINS_MAX];
	const struct dirent *entry;
	size_t count = 0;

	while ((entry = readdir(folder)) != NULL) {
		if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
			continue;
		if (!maker->set.force) {
			error_set(err, -ENOTEMPTY, "write to", maker->folder, -1,
				  "the folder is not empty");
			error_hint(err, "Name a new one, or add --force to replace files in it");
			return -ENOTEMPTY;
		}
		if (count < REMAINS_MAX && in_the_way(&maker->spec, entry->d_name)) {
			remains[count] = strdup(entry->d_name);
			if (!remains[count])
				break;
			count++;
		}
	}
	return count ? tell_remains(maker, remains, count, err) : 0;
}

static int enter_folder(struct maker *maker, struct pen_error *err)
{
	struct stat info;
	DIR *folder;
	int rc;

	if (lstat(maker->folder, &info) && (errno == ENOENT || errno == ENOTDIR)) {
		maker->new_folder = true;
		return stage_beside(&maker->stage, maker->folder, err);
	}
	folder = opendir(maker->folder);
	if (!folder && errno == ENOTDIR) {
		error_set(err, -ENOTDIR, "write to", maker->folder, -1,
			  "it is a file, not a folder");
		error_hint(err, "Name a folder; a new one is made");
		return -ENOTDIR;
	}
	if (!folder) {
		rc = error_sys(err, -errno, "open", maker->folder, -1);
		error_hint(err, "Check the path and its permissions, or name a new folder");
		return rc;
	}
	if (stage_sweep(maker->folder, ".")) {
		closedir(folder);
		error_set(err, -EBUSY, "write to", maker->folder, -1,
			  "another make-model is at work in it");
		error_hint(err, "Wait until it is done, or name another folder");
		return -EBUSY;
	}
	rc = check_folder(maker, folder, err);
	closedir(folder);
	return rc ? rc : stage_open(&maker->stage, maker->folder, ".", err);
}

/* ---------------------------------------------------------------------------- the command -- */

static void print_report(const struct maker *maker, const char *model)
{
	const struct spec *spec = &maker->spec;
	double rate = (double)maker->report.bytes / maker->seconds;
	char bytes[REPORT_BYTES_MAX], seconds[REPORT_BYTES_MAX], speed[REPORT_BYTES_MAX];
	char durable[REPORT_BYTES_MAX];
	json_t *object, *files;

	if (!maker->set.json) {
		report_name(maker->folder, 0);
		printf(": %zu %s, %zu tensors, %s in %s: %s (%s of it to make it durable)\n",
		       spec->file_count, spec->file_count == 1 ? "file" : "files",
		       spec->tensor_count, report_bytes(maker->report.bytes, bytes, sizeof(bytes)),
		       report_seconds(maker->seconds, seconds, sizeof(seconds)),
		       report_rate(rate, speed, sizeof(speed)),
		       report_seconds(maker->commit_seconds, durable, sizeof(durable)));
		return;
	}
	object = json_object();
	files = json_array();
	for (size_t i = 0; i < spec->file_count; i++)
		json_array_append_new(files, report_text(spec->files[i].name));
	json_object_set_new(object, "model", report_text(model));
	json_object_set_new(object, "folder", report_text(maker->folder));
	json_object_set_new(object, "seed", json_integer(maker->set.seed));
	json_object_set_new(object, "files", files);
	json_object_set_new(object, "tensors", json_integer((json_int_t)spec->tensor_count));
	json_object_set_new(object, "tensor_bytes", report_number(spec->bytes));
	json_object_set_new(object, "bytes", report_number(maker->report.bytes));
	json_object_set_new(object, "seconds", report_real(maker->seconds));
	json_object_set_new(object, "commit_seconds", report_real(maker->commit_seconds));
	json_object_set_new(object, "gb_per_s", report_real(rate / 1e9));
	report_json(object);
}

static int run(struct maker *maker, struct pen_error *err)
{
	double start = seconds_now();
	int rc = enter_folder(maker, err);

	if (rc)
		return rc;
	normal_init();
	rc = open_objects(maker, err);
	if (!rc)
		rc = write_files(maker, err);
	if (!rc)
		rc = commit(maker, err);
	maker->seconds = seconds_now() - start;
	return rc;
}

/* The name of a folder without slashes at its end. */
static const char *plain_folder(char *name)
{
	size_t length = strlen(name);

	while (length > 1 && name[length - 1] == '/')
		name[--length] = 0;
	return name;
}

/* People know the folder by its name to be, and want to know what is left in it. */
static void tell_place(const struct maker *maker, struct pen_error *err)
{
	size_t length = maker->new_folder && maker->stage.path ? strlen(maker->stage.path) : 0;
	char object[sizeof(err->object)];

	if (length && !strncmp(err->object, maker->stage.path, length)) {
		snprintf(object, sizeof(object), "%s%s", maker->folder, err->object + length);
		text_copy_end(err->object, sizeof(err->object), object);
	}
	if (maker->mixed)
		snprintf(err->hint, sizeof(err->hint),
			 "%zu files are new and could not be undone, the others are old: "
			 "make it again with --force", maker->mixed);
}

static int run_make_model(int argc, char **argv)
{
	struct maker maker = { .report = PEN_REPORT_INIT };
	struct pen_error err;
	int status = STATUS_USAGE;
	int rc = options_parse(&command_make_model, argc, argv, &maker.set, &err);

	if (rc > 0)
		return STATUS_OK;
	if (!rc) {
		rc = spec_init(&maker.spec, argv[0], &err);
		/* What it says may be wrong; that it cannot be read is no wrong call. */
		if (rc != -EINVAL)
			status = STATUS_FAILURE;
	}
	if (!rc) {
		maker.folder = plain_folder(argv[1]);
		interrupt_init();
		progress_init(&maker.progress, !maker.set.quiet);
		rc = run(&maker, &err);
		if (rc == -ECANCELED && interrupt_signal()) {
			status = 128 + interrupt_signal();
			error_set(&err, rc, "make", maker.folder, -1,
				  "interrupted%s%s", maker.mixed ? "" : "; nothing was written to ",
				  maker.mixed ? "" : maker.folder);
			error_hint(&err, "Run it again; it starts from the beginning");
		}
		if (rc)
			tell_place(&maker, &err);
	}
	if (rc)
		report_error(&err, maker.set.json);
	else if (maker.set.json || !maker.set.quiet)
		print_report(&maker, argv[0]);
	close_objects(&maker);
	spec_fini(&maker.spec);
	return rc ? status : STATUS_OK;
}

const struct command command_make_model = {
	.name = "make-model",
	.operands = "MODEL OUT",
	.operand_count = 2,
	.summary = "write a model with made-up numbers, to measure with",
	.description = "Write a checkpoint of safetensors files to the folder OUT. MODEL is 0.6b "
		       "or 7b (the tensors of Qwen3-0.6B and Qwen2.5-7B), a list of properties "
		       "such as layers=4,hidden=256,shards=2, or a JSON file that lists tensors. "
		       "The numbers are random, and the same for the same --seed.",
	.options = make_model_options,
	.run = run_make_model,
};
