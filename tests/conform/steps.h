/* SPDX-License-Identifier: MIT */
#ifndef STEPS_H
#define STEPS_H
/* Saving small steps into a folder of checkpoints, for tests. A state is one storage of bytes that
 * follow from the step, so that files of two steps, or of two turns of one, can be told apart. */
#include "kit.h"
#include "../unit/scratch.h"

#define STEP_PICKLE "\x80\2}."	/* an empty dict */
#define STEP_BYTES (40 * KIB + 5)

/* Write a rank's file; its size follows from `mark`, too. */
KIT int step_write(const char *path, unsigned int mark, struct pen_error *err)
{
	struct pen_torch_part part = { .name = "data.pkl", .bytes = STEP_PICKLE, .length = 4 };
	struct pen_torch_content content = PEN_TORCH_CONTENT_INIT;
	static unsigned char bytes[STEP_BYTES + 256];
	struct pen_torch_storage storage = { .memory = bytes, .bytes = STEP_BYTES + mark % 256 };
	struct pen_torch_save *save;
	struct pen_device *host;
	int rc = pen_device_open("host", &host, err);

	if (rc)
		return rc;
	memset(bytes, (int)(mark % 251), sizeof(bytes));
	content.parts = &part;
	content.part_count = 1;
	content.storages = &storage;
	content.storage_count = 1;
	rc = pen_torch_save_start(path, host, &content, NULL, &save, err);
	if (!rc)
		rc = pen_torch_save_wait(save, NULL, err);
	pen_device_close(host);
	return rc;
}

/* All of it, as one rank of one. */
KIT int step_save(struct pen_checkpoints *folder, uint64_t step, uint32_t flags, unsigned int mark,
		  struct pen_error *err)
{
	struct pen_checkpoint_file file;
	const char *path;
	int rc = pen_checkpoints_begin(folder, step, 1, flags, &path, err);

	if (rc)
		return rc;
	rc = step_write(path, mark, err);
	if (!rc)
		rc = pen_checkpoints_describe(folder, &file, err);
	if (!rc)
		rc = pen_checkpoints_commit(folder, &file, 1, "{\"mark\": 1}", err);
	if (rc)
		pen_checkpoints_abandon(folder, NULL);
	return rc;
}

/* "STATE STEP" of all steps, such as "whole 1, unfinished 2". */
KIT const char *steps_told(struct pen_checkpoints *folder)
{
	static const char *const states[] = { "whole", "damaged", "unfinished" };
	static char text[4096];
	struct pen_checkpoint_list *list;
	size_t used = 0;

	OK(pen_checkpoints_list(folder, &list, &kit_err));
	text[0] = 0;
	for (size_t i = 0; i < list->count; i++)
		used += (size_t)snprintf(text + used, sizeof(text) - used, "%s%s %llu",
					 i ? ", " : "", states[list->steps[i].state],
					 (unsigned long long)list->steps[i].step);
	pen_checkpoint_list_free(list);
	return text;
}

KIT struct pen_checkpoints *steps_open(const char *path, enum pen_mode mode, uint32_t rank)
{
	struct pen_checkpoints *folder;

	OK(pen_checkpoints_open(path, mode, rank, &folder, &kit_err));
	return folder;
}

#endif
