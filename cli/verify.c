/* SPDX-License-Identifier: MIT */
/*
 * penstock verify: is a file as it was saved? A file of torch's is read whole and compared with
 * the sums that it has; a packed one is decoded. Other safetensors files have no sums: of these
 * only the headers can be checked.
 */
#include <stdbool.h>
#include <stdio.h>
#include "commands.h"
#include "inspect_torch.h"
#include "report.h"

struct settings {
	bool json;
};

static const struct option_entry verify_options[] = {
	{ "json", 0, OPTION_FLAG, .where = offsetof(struct settings, json),
	  .help = "Report as one JSON object" },
	{ "help", 'h', OPTION_HELP, .help = "Show this" },
	{ .name = NULL },
};

static void print_json(const char *path, const char *format, const char *by, uint64_t verified,
		       uint64_t unverified)
{
	json_t *object = json_object();

	json_object_set_new(object, "file", report_text(path));
	json_object_set_new(object, "format", json_string(format));
	json_object_set_new(object, "verified_by", json_string(by));
	json_object_set_new(object, "verified_bytes", report_number(verified));
	json_object_set_new(object, "unverified_bytes", report_number(unverified));
	report_json(object);
}

static int verify_torch(const char *path, bool json, struct pen_error *err)
{
	struct pen_torch_checked checked = PEN_TORCH_CHECKED_INIT;
	char size[REPORT_BYTES_MAX], rest[REPORT_BYTES_MAX];
	struct pen_torch *file;
	int rc = pen_torch_open(path, &file, err);

	if (rc)
		return rc;
	rc = pen_torch_verify(file, NULL, &checked, err);
	pen_torch_close(file);
	if (rc)
		return rc;
	if (json) {
		print_json(path, "torch", inspect_torch_by(checked.by), checked.verified,
			   checked.unverified);
		return 0;
	}
	report_name(path, 0);
	if (checked.by == PEN_TORCH_BY_NOTHING)
		printf("\n  it was saved without CRC32s: its directory is right, nothing more can "
		       "be said\n");
	else
		printf("\n  %s are as they were saved, by %s\n",
		       report_bytes(checked.verified, size, sizeof(size)),
		       checked.by == PEN_TORCH_BY_TABLE ? "digests and CRC32s" : "CRC32s");
	if (checked.unverified && checked.by != PEN_TORCH_BY_NOTHING)
		printf("  of %s the file has no sums\n",
		       report_bytes(checked.unverified, rest, sizeof(rest)));
	return 0;
}

/* A packed file is unpacked to nowhere: each chunk has a checksum, and the whole a CRC32. */
static int verify_packed(const char *path, struct pen_error *err)
{
	struct pen_pack *pack;
	int rc = pen_unpack_start(path, NULL, NULL, &pack, err);

	return rc ? rc : pen_pack_wait(pack, NULL, err);
}

/* Bytes of a model's files, those of packed ones as they were before. */
struct verified {
	uint64_t packed, plain;
	uint64_t headers;	/* of the plain ones */
};

static int verify_files(const struct pen_model *model, struct verified *verified,
			struct pen_error *err)
{
	const struct pen_model_file *files;
	size_t count = pen_model_files(model, &files);
	int rc = 0;

	for (size_t i = 0; !rc && i < count; i++) {
		if (files[i].original) {
			rc = verify_packed(files[i].path, err);
			verified->packed += files[i].original;
		} else {
			verified->headers += files[i].data;
			verified->plain += files[i].size;
		}
	}
	return rc;
}

static void print_model(const char *path, const struct pen_model *model,
			const struct verified *verified)
{
	char size[REPORT_BYTES_MAX];

	report_name(path, 0);
	putchar('\n');
	if (verified->packed)
		printf("  %s are as they were packed, by checksums of all chunks and CRC32s\n",
		       report_bytes(verified->packed, size, sizeof(size)));
	if (verified->plain)
		printf("  the headers (%llu bytes) are right and the sizes fit; safetensors "
		       "files have no\n  checksums, so nothing can be said of the tensors' bytes\n",
		       (unsigned long long)verified->headers);
	report_warnings_text(model);
}

static int verify_model(const char *path, bool json, struct pen_error *err)
{
	struct verified verified = { 0 };
	struct pen_model *model;
	int rc = pen_model_open(path, &model, err);

	if (rc)
		return rc;
	rc = verify_files(model, &verified, err);
	if (!rc && json)
		print_json(path, "safetensors", verified.packed ? "checksums" : "nothing",
			   verified.packed, verified.plain);
	else if (!rc)
		print_model(path, model, &verified);
	pen_model_close(model);
	return rc;
}

static int run_verify(int argc, char **argv)
{
	struct settings set = { .json = false };
	struct pen_error err;
	int rc = options_parse(&command_verify, argc, argv, &set, &err);

	if (rc) {
		if (rc < 0)
			report_error(&err, set.json);
		return rc < 0 ? STATUS_USAGE : STATUS_OK;
	}
	rc = inspect_is_torch(argv[0]) ? verify_torch(argv[0], set.json, &err)
				       : verify_model(argv[0], set.json, &err);
	if (rc)
		report_error(&err, set.json);
	return rc ? STATUS_FAILURE : STATUS_OK;
}

const struct command command_verify = {
	.name = "verify",
	.operands = "FILE",
	.operand_count = 1,
	.summary = "read a checkpoint and say whether it is as it was saved",
	.description = "Read all of FILE, as torch.save or Penstock wrote it, and compare it with "
		       "the CRC32s and digests that it has. A model that was packed is decoded, "
		       "and compared with its checksums. Another safetensors file, or a folder of "
		       "them, has none: there only the headers are checked.",
	.options = verify_options,
	.run = run_verify,
};
