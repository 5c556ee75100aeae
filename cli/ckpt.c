/* SPDX-License-Identifier: MIT */
/*
 * penstock ckpt: a folder of checkpoints in the shell. list and show read manifests, verify reads
 * everything, gc removes what is not wanted any more and what a crash left. Looking needs no lock
 * and disturbs nobody; gc is refused while somebody saves there.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "commands.h"
#include "report.h"

struct settings {
	uint32_t keep;
	bool dry_run, all, json, quiet;
};

#define AT(field) .where = offsetof(struct settings, field)

static const struct option_entry ckpt_options[] = {
	{ "keep", 0, OPTION_NUMBER, "N", AT(keep), .min = 1, .max = UINT32_MAX,
	  .help = "With gc: keep the last N steps that are whole, and remove those before; "
		  "otherwise all are kept, and only what a crash left is removed" },
	{ "dry-run", 0, OPTION_FLAG, AT(dry_run),
	  .help = "With gc: remove nothing, tell what would be" },
	{ "all", 0, OPTION_FLAG, AT(all), .help = "With verify: all steps, not only the last" },
	{ "json", 0, OPTION_FLAG, AT(json), .help = "Report as one JSON object" },
	{ "quiet", 'q', OPTION_FLAG, AT(quiet), .help = "No report for people" },
	{ "help", 'h', OPTION_HELP, .help = "Show this" },
	{ .name = NULL },
};

/* What is being done, and to what. */
struct work {
	const struct settings *set;
	struct pen_checkpoints *folder;
	bool has_step;
	uint64_t step;
	struct pen_error err;
};

static const char *const states[] = {
	[PEN_CHECKPOINT_WHOLE] = "whole",
	[PEN_CHECKPOINT_DAMAGED] = "damaged",
	[PEN_CHECKPOINT_UNFINISHED] = "unfinished",
};

static uint64_t count_tensors(const struct pen_checkpoint *step)
{
	uint64_t count = 0;

	for (size_t i = 0; i < step->file_count; i++)
		count += step->files[i].tensors;
	return count;
}

static void print_folder(const struct work *work)
{
	report_name(pen_checkpoints_path(work->folder), 0);
	putchar('\n');
}

static json_t *folder_json(const struct work *work)
{
	json_t *object = json_object();

	json_object_set_new(object, "folder", report_text(pen_checkpoints_path(work->folder)));
	return object;
}

/* ------------------------------------------------------------------------------------ list -- */

static json_t *step_json(const struct pen_checkpoint *step)
{
	json_t *object = json_object();

	json_object_set_new(object, "step", report_number(step->step));
	json_object_set_new(object, "state", json_string(states[step->state]));
	json_object_set_new(object, "problem",
			    step->problem[0] ? report_text(step->problem) : json_null());
	json_object_set_new(object, "time", step->world_size ? json_string(step->time)
							     : json_null());
	json_object_set_new(object, "world_size", report_number(step->world_size));
	json_object_set_new(object, "tensors", report_number(count_tensors(step)));
	json_object_set_new(object, "bytes", report_number(step->bytes));
	return object;
}

static void list_json(const struct work *work, const struct pen_checkpoint_list *list)
{
	json_t *object = folder_json(work), *steps = json_array();

	json_object_set_new(object, "latest", json_null());
	for (size_t i = 0; i < list->count; i++) {
		json_array_append_new(steps, step_json(&list->steps[i]));
		if (list->steps[i].state == PEN_CHECKPOINT_WHOLE)
			json_object_set_new(object, "latest", report_number(list->steps[i].step));
	}
	json_object_set_new(object, "steps", steps);
	report_json(object);
}

static void list_text(const struct work *work, const struct pen_checkpoint_list *list)
{
	char size[REPORT_BYTES_MAX];

	print_folder(work);
	if (!list->count) {
		printf("  no checkpoints\n");
		return;
	}
	printf("  %10s  %-20s  %5s  %8s  %10s  %s\n", "step", "time", "ranks", "tensors", "size",
	       "state");
	for (size_t i = 0; i < list->count; i++) {
		const struct pen_checkpoint *step = &list->steps[i];

		printf("  %10" PRIu64 "  ", step->step);
		if (step->world_size)
			printf("%-20s  %5" PRIu32 "  %8" PRIu64 "  %10s  ", step->time,
			       step->world_size, count_tensors(step),
			       report_bytes(step->bytes, size, sizeof(size)));
		else
			printf("%-20s  %5s  %8s  %10s  ", "-", "-", "-", "-");
		printf("%s%s", states[step->state], step->problem[0] ? ": " : "\n");
		if (step->problem[0]) {
			report_name(step->problem, 0);
			putchar('\n');
		}
	}
}

static int list_steps(struct work *work)
{
	struct pen_checkpoint_list *list;
	int rc = pen_checkpoints_list(work->folder, &list, &work->err);

	if (rc)
		return rc;
	if (work->set->json)
		list_json(work, list);
	else if (!work->set->quiet)
		list_text(work, list);
	pen_checkpoint_list_free(list);
	return 0;
}

/* ------------------------------------------------------------------------------------ show -- */

static json_t *file_json(const struct pen_checkpoint_file *file)
{
	json_t *object = json_object();

	json_object_set_new(object, "name", json_string(file->name));
	json_object_set_new(object, "bytes", report_number(file->bytes));
	json_object_set_new(object, "tensors", report_number(file->tensors));
	json_object_set_new(object, "digest", json_string(file->digest));
	return object;
}

static void show_json(const struct work *work, const struct pen_checkpoint *step)
{
	json_t *object = folder_json(work), *files = json_array(), *user, *said;

	said = step_json(step);
	json_object_update(object, said);
	json_decref(said);
	for (size_t i = 0; i < step->file_count; i++)
		json_array_append_new(files, file_json(&step->files[i]));
	json_object_set_new(object, "files", files);
	/* Numbers that are too large for it: then they are told as they stand. */
	user = json_loadb(step->user, step->user_length, JSON_ALLOW_NUL, NULL);
	json_object_set_new(object, "user",
			    user ? user : report_text_bytes(step->user, step->user_length));
	report_json(object);
}

static void show_text(const struct work *work, const struct pen_checkpoint *step)
{
	char size[REPORT_BYTES_MAX];

	print_folder(work);
	printf("  step %" PRIu64 ", saved %s by %" PRIu32 " rank%s: %" PRIu64 " tensors, %s\n\n",
	       step->step, step->time, step->world_size, step->world_size == 1 ? "" : "s",
	       count_tensors(step), report_bytes(step->bytes, size, sizeof(size)));
	printf("  %-18s  %14s  %8s  %s\n", "file", "bytes", "tensors", "digest");
	for (size_t i = 0; i < step->file_count; i++)
		printf("  %-18s  %14" PRIu64 "  %8" PRIu64 "  %s\n", step->files[i].name,
		       step->files[i].bytes, step->files[i].tensors, step->files[i].digest);
	if (step->user_length > strlen("{}")) {
		printf("\n  user  ");
		report_name_bytes(step->user, step->user_length, 0);
		putchar('\n');
	}
}

/* The step that was named, or the last. */
static int find_step(struct work *work)
{
	int rc = work->has_step ? 0
				: pen_checkpoints_latest(work->folder, &work->step, &work->err);

	work->has_step = !rc;
	return rc;
}

static int show_step(struct work *work)
{
	struct pen_checkpoint *step;
	int rc = find_step(work);

	if (!rc)
		rc = pen_checkpoints_show(work->folder, work->step, &step, &work->err);
	if (rc)
		return rc;
	if (work->set->json)
		show_json(work, step);
	else if (!work->set->quiet)
		show_text(work, step);
	pen_checkpoint_free(step);
	return 0;
}

/* ---------------------------------------------------------------------------------- verify -- */

/* One step, told in `steps` or in a line. */
static int verify_one(struct work *work, uint64_t step, json_t *steps)
{
	struct pen_checkpoint_checked checked = PEN_CHECKPOINT_CHECKED_INIT;
	char size[REPORT_BYTES_MAX];
	int rc = pen_checkpoints_verify(work->folder, step, NULL, &checked, &work->err);
	json_t *object = json_object();

	json_object_set_new(object, "step", report_number(step));
	json_object_set_new(object, "problem", rc ? report_text(work->err.message) : json_null());
	json_object_set_new(object, "files", report_number(checked.files));
	json_object_set_new(object, "bytes", report_number(checked.bytes));
	json_object_set_new(object, "verified_bytes", report_number(checked.verified));
	json_object_set_new(object, "unverified_bytes", report_number(checked.unverified));
	json_array_append_new(steps, object);
	if (rc || work->set->json || work->set->quiet)
		return rc;
	printf("  step %" PRIu64 ": %" PRIu64 " file%s, %s are as they were saved\n", step,
	       checked.files, checked.files == 1 ? "" : "s",
	       report_bytes(checked.verified, size, sizeof(size)));
	if (checked.unverified)
		printf("    of %s the files have no sums\n",
		       report_bytes(checked.unverified, size, sizeof(size)));
	return 0;
}

/* Each that is wrong is told at once, and the next ones are looked at all the same. */
static int verify_all(struct work *work, json_t *steps)
{
	struct pen_checkpoint_list *list;
	int worst = 0, rc = pen_checkpoints_list(work->folder, &list, &work->err);

	if (rc)
		return rc;
	for (size_t i = 0; i < list->count; i++) {
		if (list->steps[i].state == PEN_CHECKPOINT_UNFINISHED)
			continue;
		rc = verify_one(work, list->steps[i].step, steps);
		/* Removed meanwhile, by who saves there. */
		if (rc == -ENOENT)
			continue;
		if (rc)
			report_error(&work->err, false);
		worst = worst ? worst : rc;
	}
	pen_checkpoint_list_free(list);
	return worst;
}

static int verify_steps(struct work *work)
{
	json_t *object = folder_json(work), *steps = json_array();
	int rc = work->set->all ? 0 : find_step(work);
	bool told;

	if (!rc && !work->set->json && !work->set->quiet)
		print_folder(work);
	if (!rc)
		rc = work->set->all ? verify_all(work, steps)
				    : verify_one(work, work->step, steps);
	/* With --all what is wrong has been told of each step. */
	told = work->set->all && json_array_size(steps);
	json_object_set_new(object, "steps", steps);
	if (work->set->json && (!rc || told))
		report_json(object);
	else
		json_decref(object);
	return rc && told ? 1 : rc;
}

/* -------------------------------------------------------------------------------------- gc -- */

static void add_names(json_t *list, const char *const *names, size_t count)
{
	for (size_t i = 0; i < count; i++)
		json_array_append_new(list, report_text(names[i]));
}

static void print_names(const char *what, const json_t *names)
{
	size_t number;
	json_t *name;

	json_array_foreach(names, number, name) {
		printf("  %-13s", what);
		report_name(json_string_value(name), 0);
		putchar('\n');
	}
}

/* The report of both, in the members of one object. */
static void tell(const struct work *work, const struct pen_checkpoint_removal *swept,
		 const struct pen_checkpoint_removal *old)
{
	json_t *object = folder_json(work), *removed = json_array(), *left = json_array();
	json_t *steps = json_array();
	uint64_t bytes = swept->bytes + (old ? old->bytes : 0);
	bool dry = work->set->dry_run;
	char size[REPORT_BYTES_MAX];

	add_names(removed, swept->removed, swept->removed_count);
	add_names(left, swept->left, swept->left_count);
	if (old) {
		add_names(removed, old->removed, old->removed_count);
		add_names(left, old->left, old->left_count);
	}
	for (size_t i = 0; old && i < old->step_count; i++)
		json_array_append_new(steps, report_number(old->steps[i]));
	json_object_set_new(object, "dry_run", json_boolean(dry));
	json_object_set_new(object, "steps", steps);
	json_object_set_new(object, "removed", removed);
	json_object_set_new(object, "left", left);
	json_object_set_new(object, "bytes", report_number(bytes));
	if (work->set->json) {
		report_json(object);
		return;
	}
	if (!work->set->quiet) {
		print_folder(work);
		print_names(dry ? "would remove" : "removed", removed);
		print_names("left", left);
		printf("  %s %s\n", report_bytes(bytes, size, sizeof(size)),
		       dry ? "would be free" : "are free");
	}
	json_decref(object);
}

static int remove_steps(struct work *work)
{
	struct pen_checkpoint_removal *swept = NULL, *old = NULL;
	uint32_t flags = work->set->dry_run ? PEN_CHECKPOINT_DRY_RUN : 0;
	struct pen_checkpoints *writer;
	int rc;

	/* It is there: one that is not would be created. */
	rc = pen_checkpoints_open(pen_checkpoints_path(work->folder), PEN_WRITE, 0, &writer,
				  &work->err);
	if (rc)
		return rc;
	if (pen_checkpoints_warning(writer)[0])
		fprintf(stderr, "penstock: %s\n", pen_checkpoints_warning(writer));
	rc = pen_checkpoints_sweep(writer, flags, &swept, &work->err);
	if (!rc && work->set->keep)
		rc = pen_checkpoints_gc(writer, work->set->keep, flags, &old, &work->err);
	if (!rc)
		tell(work, swept, old);
	pen_checkpoint_removal_free(swept);
	pen_checkpoint_removal_free(old);
	pen_checkpoints_close(writer);
	return rc;
}

/* ----------------------------------------------------------------------------- the command -- */

static const char *const actions[] = { "list", "show", "verify", "gc", NULL };
enum { LIST, SHOW, VERIFY, GC, ACTIONS };

static int find_action(const char *name, struct pen_error *err)
{
	const char *near = options_nearest(name, actions, sizeof(actions[0]));

	for (int i = 0; actions[i]; i++)
		if (!strcmp(name, actions[i]))
			return i;
	error_set(err, -EINVAL, "ckpt", name, -1, "there is no such action");
	if (near)
		error_hint(err, "Did you mean '%s'?", near);
	else
		error_hint(err, "It takes list, show, verify or gc");
	return -EINVAL;
}

/* "1200", or the name of its folder. */
static int parse_step(const char *text, struct work *work)
{
	const char *number = strncmp(text, "step-", 5) ? text : text + 5;

	if (text_to_number(number, INT64_MAX, &work->step)) {
		error_set(&work->err, -EINVAL, "ckpt", text, -1, "it is no step");
		error_hint(&work->err, "A step is a number, such as 1200, or a name, such as "
				       "step-00001200");
		return -EINVAL;
	}
	work->has_step = true;
	return 0;
}

/* What is said for one action and given to another was meant otherwise. */
static int check(int action, const char *step, struct work *work)
{
	const struct settings *set = work->set;
	const char *wrong = (set->keep && action != GC) ? "--keep"
			    : (set->dry_run && action != GC) ? "--dry-run"
			    : (set->all && action != VERIFY) ? "--all" : NULL;

	if (wrong)
		return error_set(&work->err, -EINVAL, "use", wrong, -1,
				 "ckpt %s has no such option", actions[action]);
	if (!step)
		return 0;
	if (action == LIST || action == GC || set->all)
		return error_set(&work->err, -EINVAL, "ckpt", step, -1, "%s%s takes no STEP",
				 actions[action], set->all ? " --all" : "");
	return parse_step(step, work);
}

static int run_ckpt(int argc, char **argv)
{
	static int (*const act[ACTIONS])(struct work *) = {
		[LIST] = list_steps, [SHOW] = show_step, [VERIFY] = verify_steps,
		[GC] = remove_steps,
	};
	struct settings set = { .keep = 0 };
	struct work work = { .set = &set };
	int action, rc = options_parse(&command_ckpt, argc, argv, &set, &work.err);

	if (rc > 0)
		return STATUS_OK;
	action = rc ? rc : find_action(argv[0], &work.err);
	rc = action < 0 ? action : check(action, argv[2], &work);
	if (rc) {
		report_error(&work.err, set.json);
		return STATUS_USAGE;
	}
	rc = pen_checkpoints_open(argv[1], PEN_READ, 0, &work.folder, &work.err);
	if (!rc)
		rc = act[action](&work);
	if (rc < 0)
		report_error(&work.err, set.json);
	pen_checkpoints_close(work.folder);
	return rc ? STATUS_FAILURE : STATUS_OK;
}

const struct command command_ckpt = {
	.name = "ckpt",
	.operands = "ACTION DIR [STEP]",
	.operand_count = 2,
	.operands_optional = 1,
	.first_choices = actions,
	.summary = "list, show, verify and remove the checkpoints in a folder",
	.description = "ACTION is list (all steps of the folder DIR), show (what is in a STEP), "
		       "verify (read a STEP and say whether it is as it was saved) or gc (remove "
		       "what a crash left and, with --keep, old steps). Without STEP it is the "
		       "last one that is whole.",
	.options = ckpt_options,
	.run = run_ckpt,
};
