/* SPDX-License-Identifier: MIT */
/*
 * Read a file that torch.save wrote, verified as its bytes pass, and write it again as Penstock
 * does: storages at multiples of 4096, so that they travel directly, and with digests of chunks.
 * The pickle is taken over as it is; torch.load opens the new file as it did the old one.
 *
 *	cc -o repack_torch repack_torch.c $(pkg-config --cflags --libs penstock)
 *	./repack_torch old.pt new.pt
 */
#include <penstock.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int fail(const struct pen_error *err)
{
	char text[1024];

	pen_error_format(err, text, sizeof(text));
	fprintf(stderr, "repack_torch: %s\n", text);
	return 1;
}

/* Read the small records; a storage becomes an extent, to be loaded by one job. */
static int take(struct pen_torch *file, const struct pen_torch_record *record,
		struct pen_torch_content *content, struct pen_extent *extents,
		struct pen_error *err)
{
	struct pen_torch_part *part = (void *)&content->parts[content->part_count];
	struct pen_torch_storage *storage = (void *)&content->storages[content->storage_count];
	void *memory = malloc(record->bytes + 1);

	if (!strncmp(record->name, "data/", 5)) {
		storage->memory = extents[content->storage_count].memory = memory;
		storage->bytes = extents[content->storage_count].length = record->bytes;
		storage->key = record->name + 5;
		extents[content->storage_count].object = pen_torch_object(file);
		extents[content->storage_count++].offset = record->offset;
		return 0;
	}
	/* What tells where storages lay, or vouches for that, is not true of the new file. */
	if (record->name[0] == '.')
		return 0;
	part->name = record->name;
	part->bytes = memory;
	part->length = record->bytes;
	content->part_count++;
	return pen_torch_read(file, record, memory, err);
}

int main(int argc, char **argv)
{
	struct pen_torch_content content = PEN_TORCH_CONTENT_INIT;
	struct pen_torch_checked checked = PEN_TORCH_CHECKED_INIT;
	struct pen_options options = PEN_OPTIONS_INIT;
	const struct pen_torch_record *records;
	struct pen_torch_check *check;
	struct pen_torch_save *save;
	struct pen_extent *extents;
	struct pen_device *host;
	struct pen_torch *file;
	struct pen_error err;
	size_t count;

	if (argc != 3) {
		fprintf(stderr, "usage: repack_torch OLD NEW\n");
		return 2;
	}
	if (pen_device_open("host", &host, &err) || pen_torch_open(argv[1], &file, &err) ||
	    pen_torch_check_new(file, NULL, &check, &err))
		return fail(&err);
	count = pen_torch_records(file, &records);
	content.parts = calloc(count, sizeof(*content.parts));
	content.storages = calloc(count, sizeof(*content.storages));
	extents = calloc(count, sizeof(*extents));
	for (size_t i = 0; i < count; i++)
		if (take(file, &records[i], &content, extents, &err))
			return fail(&err);

	options.digests = pen_torch_check_digests(check);
	options.digest_count = 1;
	if (pen_transfer(PEN_READ, host, extents, content.storage_count, &options, NULL, &err) ||
	    pen_torch_check_end(check, &checked, &err) ||
	    pen_torch_save_start(argv[2], host, &content, NULL, &save, &err) ||
	    pen_torch_save_wait(save, NULL, &err))
		return fail(&err);
	printf("%zu storages, %llu bytes verified\n", content.storage_count,
	       (unsigned long long)checked.verified);
	return 0;
}
