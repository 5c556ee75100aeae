/* SPDX-License-Identifier: MIT */
/*
 * penstock inspect: what a model has in it - files, tensors, metadata - and what is wrong with it.
 * Only headers are read. A file of torch's has its own listing (inspect_torch.c).
 */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "commands.h"
#include "inspect_torch.h"
#include "keys.h"
#include "model.h"
#include "report.h"

#define ALIGNMENT_MOST 4096	/* more is of no use to anybody */
#define NAME_WIDTH 60		/* longer names push their line to the right */

struct settings {
	struct option_list keys;
	bool json;
};

#define AT(field) .where = offsetof(struct settings, field)

static const struct option_entry inspect_options[] = {
	{ "keys", 'k', OPTION_LIST, "GLOB", AT(keys),
	  .help = "Only tensors of such names; can be given more than once" },
	{ "json", 0, OPTION_FLAG, AT(json), .help = "Report as one JSON object" },
	{ "help", 'h', OPTION_HELP, .help = "Show this" },
	{ .name = NULL },
};

/* What there is to tell: the tensors asked for, out of all of the model. */
struct listing {
	const char *path;
	struct pen_model *model;
	const struct pen_tensor **tensors;
	size_t count;
	uint64_t bytes, stored;		/* of the tensors, and of what they are in the files */
	bool coded;			/* some of them are */
	struct {
		size_t count;
		uint64_t bytes, stored;
	} dtypes[PEN_DTYPES];
};

/* Bytes of a tensor in its file. */
static uint64_t stored(const struct pen_tensor *tensor)
{
	return tensor->coded ? tensor->coded : tensor->bytes;
}

static void add_up(struct listing *list)
{
	for (size_t i = 0; i < list->count; i++) {
		const struct pen_tensor *tensor = list->tensors[i];

		list->bytes += tensor->bytes;
		list->stored += stored(tensor);
		list->coded |= tensor->coded != 0;
		list->dtypes[tensor->dtype].count++;
		list->dtypes[tensor->dtype].bytes += tensor->bytes;
		list->dtypes[tensor->dtype].stored += stored(tensor);
	}
}

static unsigned int alignment(uint64_t offset)
{
	uint64_t power = offset & -offset;

	return power && power < ALIGNMENT_MOST ? (unsigned int)power : ALIGNMENT_MOST;
}

/* ----------------------------------------------------------------------------------- JSON -- */

static void add_metadata(json_t *object, const struct pen_metadata *pair)
{
	json_t *value = report_text_bytes(pair->value, pair->value_length);
	size_t size = TEXT_ESCAPE_GROWTH * pair->key_length + 1;
	char *shown = NULL;

	/* Names of members are C strings in jansson: one with a NUL is told as people see it. */
	if (strlen(pair->key) != pair->key_length)
		shown = malloc(size);
	if (shown)
		text_escape_bytes(shown, size, pair->key, pair->key_length);
	json_object_set_new(object, shown ? shown : pair->key, value);
	free(shown);
}

static json_t *file_json(const struct pen_model_file *file)
{
	json_t *object = json_object(), *metadata = json_object();

	for (size_t i = 0; i < file->metadata_count; i++)
		add_metadata(metadata, &file->metadata[i]);
	json_object_set_new(object, "name", report_text(file->name));
	json_object_set_new(object, "path", report_text(file->path));
	json_object_set_new(object, "bytes", report_number(file->size));
	json_object_set_new(object, "original_bytes",
			    report_number(file->original ? file->original : file->size));
	json_object_set_new(object, "header_bytes", report_number(file->data));
	json_object_set_new(object, "metadata", metadata);
	return object;
}

static json_t *tensor_json(const struct pen_tensor *tensor, const struct pen_model_file *files)
{
	json_t *object = json_object(), *shape = json_array();

	for (uint32_t i = 0; i < tensor->rank; i++)
		json_array_append_new(shape, report_number(tensor->shape[i]));
	json_object_set_new(object, "name", report_text_bytes(tensor->name, tensor->name_length));
	json_object_set_new(object, "dtype", json_string(pen_dtype_name(tensor->dtype)));
	json_object_set_new(object, "shape", shape);
	json_object_set_new(object, "bytes", report_number(tensor->bytes));
	json_object_set_new(object, "coding", json_string(tensor->coded ? "planes" : "none"));
	json_object_set_new(object, "stored_bytes", report_number(stored(tensor)));
	json_object_set_new(object, "file", report_text(files[tensor->file].name));
	json_object_set_new(object, "offset", report_number(tensor->offset));
	json_object_set_new(object, "alignment", json_integer(alignment(tensor->offset)));
	return object;
}

static json_t *totals_json(const struct listing *list)
{
	json_t *object = json_object(), *dtypes = json_array();

	for (int i = 0; i < PEN_DTYPES; i++) {
		json_t *entry;

		if (!list->dtypes[i].count)
			continue;
		entry = json_object();
		json_object_set_new(entry, "dtype", json_string(pen_dtype_name(i)));
		json_object_set_new(entry, "tensors", report_number(list->dtypes[i].count));
		json_object_set_new(entry, "bytes", report_number(list->dtypes[i].bytes));
		json_object_set_new(entry, "stored_bytes", report_number(list->dtypes[i].stored));
		json_array_append_new(dtypes, entry);
	}
	json_object_set_new(object, "tensors", report_number(list->count));
	json_object_set_new(object, "bytes", report_number(list->bytes));
	json_object_set_new(object, "stored_bytes", report_number(list->stored));
	json_object_set_new(object, "dtypes", dtypes);
	return object;
}

static void print_json(const struct listing *list)
{
	json_t *object = json_object(), *files = json_array(), *tensors = json_array();
	const struct pen_model_file *file;
	size_t count = pen_model_files(list->model, &file);

	for (size_t i = 0; i < count; i++)
		json_array_append_new(files, file_json(&file[i]));
	for (size_t i = 0; i < list->count; i++)
		json_array_append_new(tensors, tensor_json(list->tensors[i], file));
	json_object_set_new(object, "model", report_text(list->path));
	json_object_set_new(object, "files", files);
	json_object_set_new(object, "tensors", tensors);
	json_object_set_new(object, "total", totals_json(list));
	json_object_set_new(object, "warnings", report_warnings(list->model));
	report_json(object);
}

/* --------------------------------------------------------------------------------- people -- */

static int name_width(const struct listing *list)
{
	int width = 4;

	for (size_t i = 0; i < list->count; i++) {
		int length = (int)text_escape_bytes(NULL, 0, list->tensors[i]->name,
						    list->tensors[i]->name_length);

		if (length > width)
			width = length < NAME_WIDTH ? length : NAME_WIDTH;
	}
	return width;
}

static void print_tensors(const struct listing *list)
{
	int width = name_width(list);

	printf("\n  %-*s  %-11s  %-16s  %13s  %4s  %14s  %5s%s\n", width, "name", "dtype", "shape",
	       "bytes", "file", "offset", "align", list->coded ? "         stored" : "");
	for (size_t i = 0; i < list->count; i++) {
		const struct pen_tensor *tensor = list->tensors[i];

		printf("  ");
		report_name_bytes(tensor->name, tensor->name_length, width);
		printf("  %-11s  ", pen_dtype_name(tensor->dtype));
		report_shape(tensor->shape, tensor->rank, 16);
		printf("  %13llu  %4u  %14llu  %5u", (unsigned long long)tensor->bytes,
		       tensor->file + 1, (unsigned long long)tensor->offset,
		       alignment(tensor->offset));
		if (list->coded)
			printf("  %13llu%s", (unsigned long long)stored(tensor),
			       tensor->coded ? " coded" : "");
		putchar('\n');
	}
}

static void print_files(const struct listing *list)
{
	const struct pen_model_file *files;
	size_t count = pen_model_files(list->model, &files);
	char size[REPORT_BYTES_MAX];

	for (size_t i = 0; i < count; i++) {
		printf("  file %zu  ", i + 1);
		report_name(files[i].name, 0);
		printf("  %s (%llu bytes, %llu of it header)",
		       report_bytes(files[i].size, size, sizeof(size)),
		       (unsigned long long)files[i].size, (unsigned long long)files[i].data);
		if (files[i].original)
			printf(", packed from %s", report_bytes(files[i].original, size,
								sizeof(size)));
		putchar('\n');
		for (size_t j = 0; j < files[i].metadata_count; j++) {
			const struct pen_metadata *pair = &files[i].metadata[j];

			printf("          ");
			report_name_bytes(pair->key, pair->key_length, 0);
			printf(": ");
			report_name_bytes(pair->value, pair->value_length, 0);
			putchar('\n');
		}
	}
}

/* The end of a line about tensors: what they are stored in, where some are coded. */
static void print_stored(uint64_t bytes, uint64_t in_files, bool coded)
{
	char size[REPORT_BYTES_MAX];

	if (coded && bytes)
		printf(" in %s (%.3f)", report_bytes(in_files, size, sizeof(size)),
		       (double)in_files / (double)bytes);
	putchar('\n');
}

static void print_totals(const struct listing *list)
{
	char size[REPORT_BYTES_MAX];

	printf("\n  %zu %s, %s (%llu bytes)", list->count, list->count == 1 ? "tensor" : "tensors",
	       report_bytes(list->bytes, size, sizeof(size)), (unsigned long long)list->bytes);
	print_stored(list->bytes, list->stored, list->coded);
	for (int i = 0; i < PEN_DTYPES; i++) {
		if (!list->dtypes[i].count)
			continue;
		printf("  %-11s  %zu %s, %s", pen_dtype_name(i), list->dtypes[i].count,
		       list->dtypes[i].count == 1 ? "tensor" : "tensors",
		       report_bytes(list->dtypes[i].bytes, size, sizeof(size)));
		print_stored(list->dtypes[i].bytes, list->dtypes[i].stored, list->coded);
	}
}

static void print_text(const struct listing *list)
{
	report_name(list->path, 0);
	putchar('\n');
	print_files(list);
	if (list->count)
		print_tensors(list);
	print_totals(list);
	report_warnings_text(list->model);
}

/* ---------------------------------------------------------------------------- the command -- */

static int run_inspect(int argc, char **argv)
{
	struct settings set = { .json = false };
	struct listing list = { .path = NULL };
	char label[MODEL_LABEL_MAX];
	struct pen_error err;
	int rc = options_parse(&command_inspect, argc, argv, &set, &err);

	if (rc) {
		if (rc < 0)
			report_error(&err, set.json);
		return rc < 0 ? STATUS_USAGE : STATUS_OK;
	}
	if (!argv[1] && inspect_is_torch(argv[0]))
		return inspect_torch(argv[0], &set.keys, set.json);
	list.path = model_label(argv, label);
	rc = model_open(argv, &list.model, &err);
	if (!rc)
		rc = keys_select(&set.keys, list.model, list.path, &list.tensors, &list.count,
				 &err);
	if (rc) {
		report_error(&err, set.json);
	} else {
		add_up(&list);
		if (set.json)
			print_json(&list);
		else
			print_text(&list);
	}
	free(list.tensors);
	pen_model_close(list.model);
	return rc ? STATUS_FAILURE : STATUS_OK;
}

const struct command command_inspect = {
	.name = "inspect",
	.operands = "MODEL",
	.operand_count = 1,
	.more_operands = true,
	.summary = "list the tensors and the metadata of a model",
	.description = "List the tensors of MODEL - a safetensors file, a folder of them, an "
		       "index, several files, or a file as torch.save writes it - with their "
		       "places, its files and its metadata, and say what is wrong with a broken "
		       "one. Only headers are read, and nothing is unpickled.",
	.options = inspect_options,
	.run = run_inspect,
};
