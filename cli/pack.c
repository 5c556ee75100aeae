/* SPDX-License-Identifier: MIT */
/*
 * penstock pack and penstock unpack: a model becomes a coded one, or what it was before.
 *
 * A file becomes a file. A folder becomes a new folder: what is a safetensors file, in it or below
 * it, is packed, everything else is copied. All files are written before the first of them gets its
 * name, in a folder with a hidden name that gets its own by one rename: what fails, is interrupted
 * or killed leaves nothing that could be taken for a model.
 */
#include <dirent.h>
#include <errno.h>
#include <limits.h>
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
#include "progress.h"
#include "report.h"
#include "seconds.h"
#include "stage.h"
#include "watch.h"

#define SUFFIX ".safetensors"
#define WINDOW ((size_t)8 << 20)	/* what other files are copied by */
#define MEMORY_LEAST ((uint64_t)4 << 20)

struct settings {
	uint64_t memory_limit;
	uint32_t threads;
	bool verify, json, quiet;
};

#define AT(field) .where = offsetof(struct settings, field)

#define OPTIONS_BOTH \
	{ "threads", 0, OPTION_NUMBER, "N", AT(threads), .min = 1, .max = 64, \
	  .help = "Threads that work on it; otherwise one for each core" }, \
	{ "memory-limit", 0, OPTION_SIZE, "SIZE", AT(memory_limit), .min = MEMORY_LEAST, \
	  .max = INT64_MAX, .help = "Use at most this much memory on the way; otherwise 128M" }, \
	{ "json", 0, OPTION_FLAG, AT(json), .help = "Report as one JSON object" }, \
	{ "quiet", 'q', OPTION_FLAG, AT(quiet), \
	  .help = "No progress bar and no report for people" }, \
	{ "help", 'h', OPTION_HELP, .help = "Show this" }, \
	{ .name = NULL }

static const struct option_entry pack_options[] = {
	{ "verify", 0, OPTION_FLAG, AT(verify),
	  .help = "Read back what was packed, decode it and compare it with the original" },
	OPTIONS_BOTH,
};

static const struct option_entry unpack_options[] = {
	OPTIONS_BOTH,
};

/* One file on its way. */
struct packed_file {
	char *from, *to;		/* paths, heap */
	uint64_t size;
	uint64_t work;			/* bytes that it is in the bar */
	bool model;			/* a safetensors file; others are copied */
	struct pen_object *object;	/* what is written */
};

struct packer {
	struct settings set;
	bool unpacks;
	const char *from, *to;		/* as the user names them */
	struct stage stage;		/* what becomes the folder; none where it is a file */
	struct packed_file *files;
	size_t file_count, file_room;
	uint64_t total, done;		/* bytes, for the bar */
	size_t model_count, coded_count;
	struct pen_packed sum;		/* of all files that are models */
	struct progress progress;
	double seconds;
};

static int no_memory(const struct packer *packer, struct pen_error *err)
{
	return error_sys(err, -ENOMEM, packer->unpacks ? "unpack" : "pack", packer->from, -1);
}

/* ------------------------------------------------------------------------------- which files -- */

static int add_file(struct packer *packer, const char *from, const char *to, uint64_t size,
		    struct pen_error *err)
{
	struct packed_file *file;

	if (packer->file_count == packer->file_room) {
		size_t room = 2 * packer->file_room + 16;
		struct packed_file *more = reallocarray(packer->files, room, sizeof(*more));

		if (!more)
			return no_memory(packer, err);
		packer->files = more;
		packer->file_room = room;
	}
	file = &packer->files[packer->file_count++];
	*file = (struct packed_file){ .from = strdup(from), .to = strdup(to), .size = size };
	if (!file->from || !file->to)
		return no_memory(packer, err);
	file->model = text_ends_with(from, SUFFIX) || !packer->stage.path;
	packer->model_count += file->model;
	file->work = size * (packer->set.verify && file->model ? 2 : 1);
	packer->total += file->work;
	return 0;
}

static int add_folder(struct packer *packer, const char *from, const char *to,
		      struct pen_error *err);

/* A file, or a folder below; hidden ones are not the model's. */
static int add_entry(struct packer *packer, const char *from, const char *to,
		     struct pen_error *err)
{
	struct stat info;

	if (stat(from, &info))
		return error_sys(err, -errno, "open", from, -1);
	if (S_ISREG(info.st_mode))
		return add_file(packer, from, to, (uint64_t)info.st_size, err);
	if (!S_ISDIR(info.st_mode))
		return 0;
	if (mkdir(to, 0777))
		return error_sys(err, -errno, "create", to, -1);
	return add_folder(packer, from, to, err);
}

static int add_folder(struct packer *packer, const char *from, const char *to,
		      struct pen_error *err)
{
	struct dirent **entries;
	int count = scandir(from, &entries, NULL, alphasort), rc = 0;

	if (count < 0)
		return error_sys(err, -errno, "list", from, -1);
	for (int i = 0; i < count; i++) {
		const char *name = entries[i]->d_name;
		char *inner = NULL, *outer = NULL;

		if (!rc && name[0] != '.') {
			if (asprintf(&inner, "%s/%s", from, name) < 0 ||
			    asprintf(&outer, "%s/%s", to, name) < 0)
				rc = no_memory(packer, err);
			else
				rc = add_entry(packer, inner, outer, err);
			free(inner);
			free(outer);
		}
		free(entries[i]);
	}
	free(entries);
	return rc;
}

/* ---------------------------------------------------------------------------- what is asked -- */

static int refuse(const struct packer *packer, int rc, const char *name, const char *why,
		  const char *hint, struct pen_error *err)
{
	error_set(err, rc, packer->unpacks ? "unpack to" : "pack to", name, -1, "%s", why);
	error_hint(err, "%s", hint);
	return rc;
}

static bool is_empty(const char *folder)
{
	DIR *list = opendir(folder);
	int count = 0;

	while (list && readdir(list))
		count++;
	if (list)
		closedir(list);
	return list && count <= 2;
}

static int check_folder(const struct packer *packer, const struct stat *from,
			struct pen_error *err)
{
	char inner[PATH_MAX], outer[PATH_MAX];
	const char *slash = strrchr(packer->to, '/');
	struct stat to;

	if (!lstat(packer->to, &to)) {
		if (!S_ISDIR(to.st_mode))
			return refuse(packer, -ENOTDIR, packer->to, "it is there and is no folder",
				      "Name a new folder", err);
		if (!is_empty(packer->to))
			return refuse(packer, -ENOTEMPTY, packer->to, "the folder is not empty",
				      "Name a new folder", err);
	}
	/* A folder in the one that is read would be read, too. */
	snprintf(outer, sizeof(outer), "%.*s", slash ? (int)(slash - packer->to) + 1 : 1,
		 slash ? packer->to : ".");
	while (realpath(outer, inner)) {
		if (!stat(inner, &to) && to.st_dev == from->st_dev && to.st_ino == from->st_ino)
			return refuse(packer, -EINVAL, packer->to,
				      "it lies in the folder that is read",
				      "Name a folder elsewhere", err);
		if (!strcmp(inner, "/"))
			break;
		snprintf(outer, sizeof(outer), "%.*s/..", (int)sizeof(outer) - 4, inner);
	}
	return 0;
}

static int check_file(const struct packer *packer, const struct stat *from, struct pen_error *err)
{
	struct stat to;

	if (stat(packer->to, &to))
		return 0;
	if (S_ISDIR(to.st_mode))
		return refuse(packer, -EISDIR, packer->to, "it is a folder, and one file is to be "
			      "written", "Name a file", err);
	if (to.st_dev == from->st_dev && to.st_ino == from->st_ino)
		return refuse(packer, -EINVAL, packer->to, "it is the file that is read",
			      "Name another file", err);
	return 0;
}

static int find_files(struct packer *packer, struct pen_error *err)
{
	struct stat info;
	int rc;

	if (stat(packer->from, &info)) {
		rc = error_sys(err, -errno, "open", packer->from, -1);
		error_hint(err, "Check the path");
		return rc;
	}
	if (!S_ISDIR(info.st_mode)) {
		rc = check_file(packer, &info, err);
		return rc ? rc : add_file(packer, packer->from, packer->to,
					  (uint64_t)info.st_size, err);
	}
	rc = check_folder(packer, &info, err);
	if (!rc)
		rc = stage_beside(&packer->stage, packer->to, err);
	if (!rc)
		rc = add_folder(packer, packer->from, packer->stage.path, err);
	if (rc || packer->model_count)
		return rc;
	error_set(err, -ENOENT, packer->unpacks ? "unpack" : "pack", packer->from, -1,
		  "the folder has no *" SUFFIX " file");
	error_hint(err, "Name the folder where the model's files are");
	return -ENOENT;
}

/* ----------------------------------------------------------------------------------- moving -- */

static void add_packed(struct packer *packer, const struct pen_packed *packed)
{
	packer->coded_count += packed->coded != 0;
	packer->sum.bytes += packed->bytes;
	packer->sum.stored += packed->stored;
	for (int i = 0; i < PEN_PACKED_KINDS; i++) {
		packer->sum.kinds[i].tensors += packed->kinds[i].tensors;
		packer->sum.kinds[i].bytes += packed->kinds[i].bytes;
		packer->sum.kinds[i].stored += packed->kinds[i].stored;
	}
}

/* How much work a model is it knows itself: of one that is packed, the bytes that it was. */
static void show(struct packer *packer, struct packed_file *file, const struct pen_progress *now)
{
	packer->total += now->total - file->work;
	file->work = now->total;
	packer->progress.total = packer->total;
	progress_show(&packer->progress, packer->done + now->bytes);
}

static int move_model(struct packer *packer, struct packed_file *file, struct pen_error *err)
{
	struct pen_pack_options options = PEN_PACK_OPTIONS_INIT;
	struct pen_packed packed = PEN_PACKED_INIT;
	struct pen_progress now;
	struct pen_pack *pack;
	int rc;

	options.memory_limit = packer->set.memory_limit;
	options.threads = packer->set.threads;
	options.verify = packer->set.verify;
	rc = packer->unpacks ? pen_unpack_start(file->from, file->object, &options, &pack, err)
			     : pen_pack_start(file->from, file->object, &options, &pack, err);
	if (rc)
		return rc;
	while (pen_pack_wait_for(pack, WATCH_LOOK_SECONDS) == -ETIMEDOUT) {
		if (interrupt_signal())
			pen_pack_cancel(pack);
		pen_pack_poll(pack, &now);
		show(packer, file, &now);
	}
	rc = pen_pack_wait(pack, &packed, err);
	if (!rc)
		add_packed(packer, &packed);
	return rc;
}

static int copy_file(struct packer *packer, const struct packed_file *file, struct pen_device *host,
		     void *window, struct pen_error *err)
{
	struct pen_extent extent = { .memory = window };
	struct pen_object *object;
	int rc = pen_object_open(file->from, PEN_READ, 0, &object, err);

	for (uint64_t at = 0; !rc && at < file->size; at += WINDOW) {
		extent.offset = at;
		extent.length = file->size - at < WINDOW ? file->size - at : WINDOW;
		extent.object = object;
		rc = pen_transfer(PEN_READ, host, &extent, 1, NULL, NULL, err);
		extent.object = file->object;
		if (!rc)
			rc = pen_transfer(PEN_WRITE, host, &extent, 1, NULL, NULL, err);
		if (!rc && interrupt_signal())
			rc = -ECANCELED;
		progress_show(&packer->progress, packer->done + at + extent.length);
	}
	pen_object_close(object);
	return rc;
}

static int move_files(struct packer *packer, struct pen_error *err)
{
	struct pen_device *host = NULL;
	void *window = NULL;
	int rc = pen_device_open("host", &host, err);

	if (!rc)
		rc = pen_device_alloc(host, WINDOW, &window, err);
	progress_start(&packer->progress, packer->unpacks ? "unpacking" : "packing",
		       packer->total);
	for (size_t i = 0; !rc && i < packer->file_count; i++) {
		struct packed_file *file = &packer->files[i];

		if (interrupt_signal())
			rc = -ECANCELED;
		/* How large a packed file gets is known when it is packed. */
		if (!rc)
			rc = pen_object_open(file->to, PEN_WRITE, file->model ? 0 : file->size,
					     &file->object, err);
		if (!rc)
			rc = file->model ? move_model(packer, file, err)
					 : copy_file(packer, file, host, window, err);
		packer->done += file->work;
	}
	progress_end(&packer->progress);
	if (window)
		pen_device_free(host, window, WINDOW, NULL);
	pen_device_close(host);
	return rc;
}

static int commit(struct packer *packer, struct pen_error *err)
{
	int rc = 0;

	if (packer->unpacks && !packer->coded_count) {
		error_set(err, -EINVAL, "unpack", packer->from, -1, "it is not packed");
		error_hint(err, "Use it as it is");
		return -EINVAL;
	}
	for (size_t i = 0; !rc && i < packer->file_count; i++)
		rc = interrupt_signal() ? -ECANCELED
					: pen_object_commit(packer->files[i].object, err);
	return rc || !packer->stage.path ? rc : stage_publish(&packer->stage, packer->to, err);
}

/* ----------------------------------------------------------------------------------- report -- */

static double ratio(uint64_t bytes, uint64_t stored)
{
	return bytes ? (double)stored / (double)bytes : 1;
}

static void print_text(const struct packer *packer)
{
	char before[REPORT_BYTES_MAX], after[REPORT_BYTES_MAX], time[REPORT_BYTES_MAX];
	char speed[REPORT_BYTES_MAX];
	const struct pen_packed *sum = &packer->sum;

	report_name(packer->to, 0);
	printf(": %zu %s, %s %s %s (%.3f) in %s: %s%s\n", packer->model_count,
	       packer->model_count == 1 ? "file" : "files",
	       report_bytes(sum->bytes, before, sizeof(before)), packer->unpacks ? "from" : "in",
	       report_bytes(sum->stored, after, sizeof(after)), ratio(sum->bytes, sum->stored),
	       report_seconds(packer->seconds, time, sizeof(time)),
	       report_rate((double)sum->bytes / packer->seconds, speed, sizeof(speed)),
	       packer->set.verify ? ", verified" : "");
	for (int i = 0; i < PEN_PACKED_KINDS; i++) {
		const struct pen_packed_kind *kind = &sum->kinds[i];

		if (kind->tensors)
			printf("  %-11s  %llu %s, %s %s %s (%.3f)\n", pen_dtype_name(i),
			       (unsigned long long)kind->tensors,
			       kind->tensors == 1 ? "tensor" : "tensors",
			       report_bytes(kind->bytes, before, sizeof(before)),
			       packer->unpacks ? "from" : "in",
			       report_bytes(kind->stored, after, sizeof(after)),
			       ratio(kind->bytes, kind->stored));
	}
	if (packer->model_count > packer->coded_count)
		printf("  %zu of the files %s, and kept\n",
		       packer->model_count - packer->coded_count,
		       packer->unpacks ? "were as they are" : "would not get smaller");
}

static void print_json(const struct packer *packer)
{
	json_t *object = json_object(), *kinds = json_array();
	const struct pen_packed *sum = &packer->sum;

	for (int i = 0; i < PEN_PACKED_KINDS; i++) {
		const struct pen_packed_kind *kind = &sum->kinds[i];
		json_t *entry;

		if (!kind->tensors)
			continue;
		entry = json_object();
		json_object_set_new(entry, "dtype", json_string(pen_dtype_name(i)));
		json_object_set_new(entry, "tensors", report_number(kind->tensors));
		json_object_set_new(entry, "bytes", report_number(kind->bytes));
		json_object_set_new(entry, "stored", report_number(kind->stored));
		json_array_append_new(kinds, entry);
	}
	json_object_set_new(object, "model", report_text(packer->from));
	json_object_set_new(object, "out", report_text(packer->to));
	json_object_set_new(object, "files", report_number(packer->model_count));
	json_object_set_new(object, "coded_files", report_number(packer->coded_count));
	json_object_set_new(object, "copied_files",
			    report_number(packer->file_count - packer->model_count));
	json_object_set_new(object, "bytes", report_number(sum->bytes));
	json_object_set_new(object, "stored", report_number(sum->stored));
	json_object_set_new(object, "ratio", report_real(ratio(sum->bytes, sum->stored)));
	json_object_set_new(object, "dtypes", kinds);
	if (!packer->unpacks)
		json_object_set_new(object, "verified", json_boolean(packer->set.verify));
	json_object_set_new(object, "seconds", report_real(packer->seconds));
	report_json(object);
}

/* ------------------------------------------------------------------------- the two commands -- */

/* The name of a folder without slashes at its end. */
static const char *plain_name(char *name)
{
	size_t length = strlen(name);

	while (length > 1 && name[length - 1] == '/')
		name[--length] = 0;
	return name;
}

static void close_all(struct packer *packer)
{
	for (size_t i = 0; i < packer->file_count; i++) {
		pen_object_close(packer->files[i].object);
		free(packer->files[i].from);
		free(packer->files[i].to);
	}
	free(packer->files);
	stage_close(&packer->stage);
}

static int run(struct packer *packer, struct pen_error *err)
{
	double start = seconds_now();
	int rc = find_files(packer, err);

	if (!rc)
		rc = move_files(packer, err);
	if (!rc)
		rc = commit(packer, err);
	packer->seconds = seconds_now() - start;
	return rc;
}

static int run_both(const struct command *command, bool unpacks, int argc, char **argv)
{
	struct packer packer = { .unpacks = unpacks };
	struct pen_error err;
	int status = STATUS_FAILURE;
	int rc = options_parse(command, argc, argv, &packer.set, &err);

	if (rc) {
		if (rc < 0)
			report_error(&err, packer.set.json);
		return rc < 0 ? STATUS_USAGE : STATUS_OK;
	}
	packer.from = plain_name(argv[0]);
	packer.to = plain_name(argv[1]);
	interrupt_init();
	progress_init(&packer.progress, !packer.set.quiet);
	rc = run(&packer, &err);
	if (rc == -ECANCELED && interrupt_signal()) {
		status = 128 + interrupt_signal();
		error_set(&err, rc, command->name, packer.from, -1,
			  "interrupted; nothing was written to %s", packer.to);
		error_hint(&err, "Run it again; it starts from the beginning");
	}
	if (rc)
		report_error(&err, packer.set.json);
	else if (packer.set.json)
		print_json(&packer);
	else if (!packer.set.quiet)
		print_text(&packer);
	close_all(&packer);
	return rc ? status : STATUS_OK;
}

static int run_pack(int argc, char **argv)
{
	return run_both(&command_pack, false, argc, argv);
}

static int run_unpack(int argc, char **argv)
{
	return run_both(&command_unpack, true, argc, argv);
}

const struct command command_pack = {
	.name = "pack",
	.operands = "MODEL OUT",
	.operand_count = 2,
	.summary = "store a model coded, in two thirds of its bytes, without loss",
	.description = "Write MODEL - a safetensors file, or a folder with such - to OUT, its "
		       "tensors coded without loss. Other files of a folder are copied. OUT is a "
		       "file, or a new folder.",
	.options = pack_options,
	.run = run_pack,
};

const struct command command_unpack = {
	.name = "unpack",
	.operands = "MODEL OUT",
	.operand_count = 2,
	.summary = "make the original of a packed model, to the byte",
	.description = "Write what MODEL was before it was packed to OUT: a file, or a new folder. "
		       "Every byte is as it was, which is checked.",
	.options = unpack_options,
	.run = run_unpack,
};
