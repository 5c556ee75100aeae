/* SPDX-License-Identifier: MIT */
/*
 * penstock explain: what the engine would do with a file here, and why not something better. It
 * asks the engine's own planner and moves nothing, so it cannot disagree with a copy.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "commands.h"
#include "device.h"
#include "report.h"

#define RANGES_SHOWN 20

struct settings {
	struct pen_options engine;
	const char *device;	/* NULL: not given */
	bool json;
};

#define AT(field) .where = offsetof(struct settings, field)

static const struct option_entry explain_options[] = {
	{ "device", 0, OPTION_DEVICE, "DEVICE", AT(device),
	  .help = "Where the bytes are to land: host (or cpu) or cuda:N; otherwise cuda:0, or "
		  "host where there is none" },
	{ "transfer", 't', OPTION_TRANSFER, "TYPE", AT(engine.transfer),
	  .help = "Explain this type instead of the best path" },
	{ "memory-limit", 0, OPTION_SIZE, "SIZE", AT(engine.memory_limit), .min = 65536,
	  .max = INT64_MAX, .help = "Use at most this much memory on the way; otherwise 128M" },
	{ "json", 0, OPTION_FLAG, AT(json), .help = "Report as one JSON object" },
	{ "help", 'h', OPTION_HELP, .help = "Show this" },
	{ .name = NULL },
};

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

static void print_json(const char *file, const char *why, const struct pen_explanation *plan)
{
	json_t *object = json_object();

	json_object_set_new(object, "file", report_text(file));
	json_object_set_new(object, "bytes", report_number(plan->bytes));
	json_object_set_new(object, "resident", report_number(plan->resident));
	json_object_set_new(object, "residency_by", report_text(plan->residency_by));
	json_object_set_new(object, "filesystem", report_text(plan->filesystem));
	json_object_set_new(object, "store", report_text(plan->store));
	json_object_set_new(object, "memory_alignment", report_number(plan->memory_alignment));
	json_object_set_new(object, "offset_alignment", report_number(plan->offset_alignment));
	json_object_set_new(object, "queue", report_text(plan->queue));
	json_object_set_new(object, "device", report_text(plan->device));
	if (why[0])
		json_object_set_new(object, "device_reason", report_text(why));
	json_object_set_new(object, "lanes", report_number(plan->lanes));
	json_object_set_new(object, "memory_limit", report_number(plan->memory_limit));
	json_object_set_new(object, "ranges", ranges_json(plan));
	json_object_set_new(object, "paths", report_paths(json_array(), NULL, plan->paths,
							  plan->path_count, false));
	json_object_set_new(object, "refused", report_paths(json_array(), NULL, plan->refused,
							    plan->refused_count, true));
	report_json(object);
}

/* --------------------------------------------------------------------------------- people -- */

static double percent(uint64_t part, uint64_t whole)
{
	return whole ? 100 * (double)part / (double)whole : 0;
}

static void print_facts(const char *file, const char *why, const struct pen_explanation *plan)
{
	char text[TEXT_SIZE_MAX];

	report_name(file, 0);
	printf("\n  size         %s (%llu bytes)\n",
	       text_from_size(plan->bytes, text, sizeof(text)), (unsigned long long)plan->bytes);
	printf("  file system  %s, store %s\n", plan->filesystem, plan->store);
	if (plan->offset_alignment)
		printf("  direct       by %s, offsets aligned to %u, memory to %u\n", plan->queue,
		       plan->offset_alignment, plan->memory_alignment);
	else
		printf("  direct       not possible here\n");
	printf("  page cache   holds %.1f %% of it (asked by %s)\n",
	       percent(plan->resident, plan->bytes), plan->residency_by);
	printf("  device       ");
	device_print(plan->device, why);
	printf("\n  resources    %u %s, at most %s pinned\n", plan->lanes,
	       plan->lanes == 1 ? "lane" : "lanes",
	       text_from_size(plan->memory_limit, text, sizeof(text)));
}

static void print_ranges(const struct pen_explanation *plan)
{
	char from[TEXT_SIZE_MAX], length[TEXT_SIZE_MAX];
	uint64_t rest = 0;

	printf("\n  %-12s %-12s %-18s %s\n", "from", "length", "path", "in page cache");
	for (size_t i = 0; i < plan->range_count; i++) {
		const struct pen_range *range = &plan->ranges[i];

		/* One more line says as much as one that counts what is left out. */
		if (i >= RANGES_SHOWN - 1 && plan->range_count > RANGES_SHOWN) {
			rest += range->length;
			continue;
		}
		printf("  %-12s %-12s %-18s %.0f %%\n",
		       text_from_size(range->offset, from, sizeof(from)),
		       text_from_size(range->length, length, sizeof(length)), range->path,
		       percent(range->resident, range->length));
	}
	if (plan->range_count > RANGES_SHOWN)
		printf("  and %zu more ranges, %s in all\n", plan->range_count - (RANGES_SHOWN - 1),
		       text_from_size(rest, length, sizeof(length)));
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

/* ---------------------------------------------------------------------------- the command -- */

static int run_explain(int argc, char **argv)
{
	struct settings set = { .engine = PEN_OPTIONS_INIT };
	struct pen_explanation *plan = NULL;
	struct pen_device *device = NULL;
	struct pen_object *object = NULL;
	char why[DEVICE_REASON_MAX];
	struct pen_error err;
	int status = STATUS_FAILURE;
	int rc = options_parse(&command_explain, argc, argv, &set, &err);

	if (rc) {
		if (rc < 0)
			report_error(&err, set.json);
		return rc < 0 ? STATUS_USAGE : STATUS_OK;
	}
	rc = pen_object_open(argv[0], PEN_READ, 0, &object, &err);
	/* Only a name that cannot be understood is invalid. */
	if (rc == -EINVAL)
		status = STATUS_USAGE;
	if (!rc)
		rc = device_open(set.device, true, &device, why, &err);
	if (!rc)
		rc = pen_explain(object, device, &set.engine, &plan, &err);
	if (rc) {
		report_error(&err, set.json);
	} else if (set.json) {
		print_json(argv[0], why, plan);
	} else {
		print_facts(argv[0], why, plan);
		print_ranges(plan);
		print_paths(plan);
	}
	pen_explain_free(plan);
	pen_object_close(object);
	pen_device_close(device);
	return rc ? status : STATUS_OK;
}

const struct command command_explain = {
	.name = "explain",
	.operands = "FILE",
	.operand_count = 1,
	.summary = "say what the engine would do with a file here, and why",
	.description = "Say which path each range of FILE would take into the memory of a device, "
		       "why, and what stands in the way of better ones. Nothing is moved.",
	.options = explain_options,
	.run = run_explain,
};
