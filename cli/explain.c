/* SPDX-License-Identifier: MIT */
/*
 * penstock explain: what the engine would do with a file here, or with each file of a model, and
 * why not something better. It asks the engine's own planner and moves nothing, so it cannot
 * disagree with a copy, or with a load of a model that is not packed: bytes that are decoded on
 * their way may go otherwise, and of a packed file that is said.
 *
 * A model is the sum of its files: what they have in common is told once, and in place of the
 * ranges of a file there is one table with the paths of all.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "base/error.h"
#include "base/text.h"
#include "commands.h"
#include "device.h"
#include "report.h"

#define ROWS_SHOWN 20	/* of a table */
#define NAME_WIDTH 40	/* longer names push their line to the right */

struct settings {
	struct pen_options engine;
	const char *device;	/* NULL: not given */
	bool json;
};

#define AT(field) .where = offsetof(struct settings, field)

static const struct option_entry explain_options[] = {
	OPTIONS_DEVICE("bytes"),
	{ "transfer", 't', OPTION_TRANSFER, "TYPE", AT(engine.transfer),
	  .help = "Explain this type instead of the best path" },
	{ "memory-limit", 0, OPTION_SIZE, "SIZE", AT(engine.memory_limit), .min = 65536,
	  .max = INT64_MAX, .help = "Use at most this much memory on the way; otherwise 128M" },
	{ "json", 0, OPTION_FLAG, AT(json), .help = "Report as one JSON object" },
	{ "help", 'h', OPTION_HELP, .help = "Show this" },
	{ .name = NULL },
};

/* A file and what would be done with it. */
struct part {
	const char *path, *name;	/* as it can be opened, and as the model calls it */
	struct pen_object *object;
	bool coded;			/* it is packed */
	struct pen_explanation *plan;
};

struct explaining {
	struct settings set;
	const char *path;
	struct pen_object *object;	/* of a file alone */
	struct pen_model *model;	/* or else of this; NULL: a file alone */
	struct pen_device *device;
	char why[DEVICE_REASON_MAX];	/* it is the host */
	struct part *parts;
	size_t count;
	struct pen_explanation sum;	/* of all parts; has no ranges */
};

/* -------------------------------------------------------------------------------- asking -- */

static bool is_model(const char *path)
{
	struct stat info;

	return text_ends_with(path, ".safetensors.index.json") ||
	       (!stat(path, &info) && S_ISDIR(info.st_mode));
}

static bool is_coded(const char *path)
{
	const struct pen_model_file *file;
	struct pen_model *model;
	bool coded;

	/* It need not be a model. */
	if (pen_model_open_files(&path, 1, &model, NULL))
		return false;
	pen_model_files(model, &file);
	coded = file->original != 0;
	pen_model_close(model);
	return coded;
}

static int open_parts(struct explaining *all, struct pen_error *err)
{
	const struct pen_model_file *files = NULL;
	int rc;

	all->count = 1;
	if (is_model(all->path)) {
		rc = pen_model_open(all->path, &all->model, err);
		all->count = rc ? 0 : pen_model_files(all->model, &files);
	} else {
		rc = pen_object_open(all->path, PEN_READ, 0, &all->object, err);
	}
	if (rc)
		return rc;
	all->parts = calloc(all->count + 1, sizeof(all->parts[0]));
	if (!all->parts)
		return error_sys(err, -ENOMEM, "explain", all->path, -1);
	all->parts[0] = (struct part){ .path = all->path, .object = all->object,
				       .coded = !all->model && is_coded(all->path) };
	for (size_t i = 0; all->model && i < all->count; i++)
		all->parts[i] = (struct part){ .path = files[i].path, .name = files[i].name,
					       .object = files[i].object,
					       .coded = files[i].original != 0 };
	return 0;
}

/* What the files have in common is that of the first. */
static void add_part(struct pen_explanation *sum, const struct pen_explanation *plan)
{
	if (!sum->device[0]) {
		*sum = *plan;
		sum->ranges = NULL;
		sum->range_count = 0;
		return;
	}
	sum->bytes += plan->bytes;
	sum->resident += plan->resident;
	if (plan->lanes > sum->lanes)
		sum->lanes = plan->lanes;
	for (uint32_t i = 0; i < plan->path_count; i++)
		report_add_path(sum->paths, &sum->path_count, &plan->paths[i]);
	for (uint32_t i = 0; i < plan->refused_count; i++)
		report_add_path(sum->refused, &sum->refused_count, &plan->refused[i]);
}

static int explain_all(struct explaining *all, struct pen_error *err)
{
	int rc = device_open(all->set.device, true, &all->device, all->why, err);

	for (size_t i = 0; !rc && i < all->count; i++) {
		struct part *part = &all->parts[i];

		rc = pen_explain(part->object, all->device, &all->set.engine, &part->plan, err);
		if (!rc)
			add_part(&all->sum, part->plan);
	}
	return rc;
}

/* ----------------------------------------------------------------------------------- JSON -- */

static json_t *ranges_json(const struct pen_explanation *plan)
{
	json_t *list = json_array();

	for (size_t i = 0; i < plan->range_count; i++) {
		const struct pen_range *range = &plan->ranges[i];
		json_t *entry = json_object();

		json_object_set_new(entry, "offset", report_number(range->offset));
		json_object_set_new(entry, "length", report_number(range->length));
		json_object_set_new(entry, "resident", report_number(range->resident));
		json_object_set_new(entry, "path", report_text(range->path));
		json_array_append_new(list, entry);
	}
	return list;
}

/* The store that a file lies on, and its ranges. */
static void add_file(json_t *object, const struct part *part)
{
	const struct pen_explanation *plan = part->plan;

	json_object_set_new(object, "file", report_text(part->path));
	json_object_set_new(object, "bytes", report_number(plan->bytes));
	json_object_set_new(object, "resident", report_number(plan->resident));
	json_object_set_new(object, "coded", json_boolean(part->coded));
	json_object_set_new(object, "residency_by", report_text(plan->residency_by));
	json_object_set_new(object, "filesystem", report_text(plan->filesystem));
	json_object_set_new(object, "store", report_text(plan->store));
	json_object_set_new(object, "memory_alignment", report_number(plan->memory_alignment));
	json_object_set_new(object, "offset_alignment", report_number(plan->offset_alignment));
	json_object_set_new(object, "queue", report_text(plan->queue));
	json_object_set_new(object, "ranges", ranges_json(plan));
}

static void add_files(json_t *object, const struct explaining *all)
{
	json_t *files = json_array();

	for (size_t i = 0; i < all->count; i++) {
		json_t *file = json_object();

		add_file(file, &all->parts[i]);
		json_array_append_new(files, file);
	}
	json_object_set_new(object, "model", report_text(all->path));
	json_object_set_new(object, "bytes", report_number(all->sum.bytes));
	json_object_set_new(object, "resident", report_number(all->sum.resident));
	json_object_set_new(object, "files", files);
	json_object_set_new(object, "warnings", report_warnings(all->model));
}

static void print_json(const struct explaining *all)
{
	const struct pen_explanation *sum = &all->sum;
	json_t *object = json_object();

	if (all->model)
		add_files(object, all);
	else
		add_file(object, &all->parts[0]);
	json_object_set_new(object, "device", report_text(pen_device_name(all->device)));
	if (all->why[0])
		json_object_set_new(object, "device_reason", report_text(all->why));
	json_object_set_new(object, "lanes", report_number(sum->lanes));
	json_object_set_new(object, "memory_limit", report_number(sum->memory_limit));
	json_object_set_new(object, "paths", report_paths(json_array(), NULL, sum->paths,
							  sum->path_count, false));
	json_object_set_new(object, "refused", report_paths(json_array(), NULL, sum->refused,
							    sum->refused_count, true));
	report_json(object);
}

/* --------------------------------------------------------------------------------- people -- */

static double percent(uint64_t part, uint64_t whole)
{
	return whole ? 100 * (double)part / (double)whole : 0;
}

static bool same_store(const struct pen_explanation *a, const struct pen_explanation *b)
{
	return !strcmp(a->filesystem, b->filesystem) && !strcmp(a->store, b->store) &&
	       !strcmp(a->queue, b->queue) && a->offset_alignment == b->offset_alignment &&
	       a->memory_alignment == b->memory_alignment;
}

/* Once for each store that files lie on; mostly it is one. */
static void print_store(const struct explaining *all, size_t number)
{
	const struct pen_explanation *plan = all->parts[number].plan;

	for (size_t i = 0; i < number; i++)
		if (same_store(all->parts[i].plan, plan))
			return;
	printf("  file system  %s, store %s\n", plan->filesystem, plan->store);
	if (plan->offset_alignment)
		printf("  direct       by %s, offsets aligned to %u, memory to %u\n", plan->queue,
		       plan->offset_alignment, plan->memory_alignment);
	else
		printf("  direct       not possible here\n");
}

static void print_facts(const struct explaining *all)
{
	const struct pen_explanation *sum = &all->sum;
	char text[TEXT_SIZE_MAX];
	size_t coded = 0;

	report_name(all->path, 0);
	putchar('\n');
	if (all->model)
		printf("  files        %zu\n", all->count);
	printf("  size         %s (%llu bytes)\n", text_from_size(sum->bytes, text, sizeof(text)),
	       (unsigned long long)sum->bytes);
	for (size_t i = 0; i < all->count; i++)
		coded += all->parts[i].coded;
	if (coded)
		printf("  packed       a load decodes it on the way, and its report tells how that "
		       "went;\n"
		       "               this is how the bytes go as they lie\n");
	for (size_t i = 0; i < all->count; i++)
		print_store(all, i);
	printf("  page cache   holds %.1f %% of it (asked by %s)\n",
	       percent(sum->resident, sum->bytes), sum->residency_by);
	printf("  device       ");
	device_print(pen_device_name(all->device), all->why);
	printf("\n  resources    %u %s, at most %s pinned\n", sum->lanes,
	       sum->lanes == 1 ? "lane" : "lanes",
	       text_from_size(sum->memory_limit, text, sizeof(text)));
}

static void print_ranges(const struct pen_explanation *plan)
{
	char from[TEXT_SIZE_MAX], length[TEXT_SIZE_MAX];
	uint64_t rest = 0;

	printf("\n  %-12s %-12s %-18s %s\n", "from", "length", "path", "in page cache");
	for (size_t i = 0; i < plan->range_count; i++) {
		const struct pen_range *range = &plan->ranges[i];

		/* One more line says as much as one that counts what is left out. */
		if (i >= ROWS_SHOWN - 1 && plan->range_count > ROWS_SHOWN) {
			rest += range->length;
			continue;
		}
		printf("  %-12s %-12s %-18s %.0f %%\n",
		       text_from_size(range->offset, from, sizeof(from)),
		       text_from_size(range->length, length, sizeof(length)), range->path,
		       percent(range->resident, range->length));
	}
	if (plan->range_count > ROWS_SHOWN)
		printf("  and %zu more ranges, %s in all\n", plan->range_count - (ROWS_SHOWN - 1),
		       text_from_size(rest, length, sizeof(length)));
}

/* The names of a file's paths with their shares, in the order of their first bytes. */
static void print_shares(const struct pen_explanation *plan)
{
	for (uint32_t i = 0; i < plan->path_count; i++)
		printf("%s%s %.0f %%", i ? ", " : "", plan->paths[i].path,
		       percent(plan->paths[i].bytes, plan->bytes));
	putchar('\n');
}

static void print_files(const struct explaining *all)
{
	char size[TEXT_SIZE_MAX];
	size_t shown = all->count > ROWS_SHOWN ? ROWS_SHOWN - 1 : all->count;
	uint64_t rest = 0;
	int width = 4;

	for (size_t i = 0; i < shown; i++) {
		int length = (int)text_escape(NULL, 0, all->parts[i].name);

		if (length > width)
			width = length < NAME_WIDTH ? length : NAME_WIDTH;
	}
	printf("\n  %-*s %-12s %-14s %s\n", width, "file", "size", "in page cache", "paths");
	for (size_t i = 0; i < all->count; i++) {
		const struct part *part = &all->parts[i];

		if (i >= shown) {
			rest += part->plan->bytes;
			continue;
		}
		printf("  ");
		report_name(part->name, width);
		printf(" %-12s %11.0f %%  ", text_from_size(part->plan->bytes, size, sizeof(size)),
		       percent(part->plan->resident, part->plan->bytes));
		print_shares(part->plan);
	}
	if (shown < all->count)
		printf("  and %zu more files, %s in all\n", all->count - shown,
		       text_from_size(rest, size, sizeof(size)));
}

static void print_paths(const struct pen_explanation *plan)
{
	char bytes[TEXT_SIZE_MAX];

	if (plan->path_count)
		printf("\nPaths taken\n");
	for (uint32_t i = 0; i < plan->path_count; i++) {
		printf("  %-18s %-10s ", plan->paths[i].path,
		       text_from_size(plan->paths[i].bytes, bytes, sizeof(bytes)));
		report_name(plan->paths[i].reason, 0);
		putchar('\n');
	}
	if (plan->refused_count)
		printf("\nBetter paths that cannot be had\n");
	for (uint32_t i = 0; i < plan->refused_count; i++) {
		printf("  %-18s ", plan->refused[i].path);
		report_name(plan->refused[i].reason, 0);
		putchar('\n');
	}
}

static void print_text(const struct explaining *all)
{
	print_facts(all);
	if (all->model)
		print_files(all);
	else
		print_ranges(all->parts[0].plan);
	print_paths(&all->sum);
	if (all->model)
		report_warnings_text(all->model);
}

/* ---------------------------------------------------------------------------- the command -- */

static void close_all(struct explaining *all)
{
	for (size_t i = 0; all->parts && i < all->count; i++)
		pen_explain_free(all->parts[i].plan);
	free(all->parts);
	pen_object_close(all->object);
	pen_model_close(all->model);
	pen_device_close(all->device);
}

static int run_explain(int argc, char **argv)
{
	struct explaining all = { .set = { .engine = PEN_OPTIONS_INIT } };
	struct pen_error err;
	int status = STATUS_FAILURE;
	int rc = options_parse(&command_explain, argc, argv, &all.set, &err);

	if (rc) {
		if (rc < 0)
			report_error(&err, all.set.json);
		return rc < 0 ? STATUS_USAGE : STATUS_OK;
	}
	all.path = argv[0];
	rc = open_parts(&all, &err);
	/* Only a name that cannot be understood is invalid. */
	if (rc == -EINVAL && !is_model(all.path))
		status = STATUS_USAGE;
	if (!rc)
		rc = explain_all(&all, &err);
	if (rc)
		report_error(&err, all.set.json);
	else if (all.set.json)
		print_json(&all);
	else
		print_text(&all);
	close_all(&all);
	return rc ? status : STATUS_OK;
}

const struct command command_explain = {
	.name = "explain",
	.operands = "PATH",
	.operand_count = 1,
	.summary = "say what the engine would do with a file or a model here, and why",
	.description = "Say which path each range of a file, or of the files of a model - a folder "
		       "or an index - would take into the memory of a device, why, and what stands "
		       "in the way of better ones. Nothing is moved.",
	.options = explain_options,
	.run = run_explain,
};
