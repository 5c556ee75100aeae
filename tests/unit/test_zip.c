/* SPDX-License-Identifier: MIT */
/* The zip around torch's records: what is written is read again, and what lies is refused. */
#include <errno.h>
#include <stdint.h>
#include "format/zip.h"
#include "test.h"

#define ROOM 4096
#define NAME "a.pt"

/* A file in memory, and what is in it. */
struct file {
	unsigned char bytes[ROOM];
	size_t size;
	struct zip_entry entries[3];
	struct zip_end end;
};

static struct pen_error err;

/* Three small records, each behind a header with padding. */
static void make(struct file *file)
{
	static const char *const names[] = { "a/data.pkl", "a/data/0", "a/version" };
	static const uint64_t sizes[] = { 10, 100, 0 };
	uint64_t at = 0;

	memset(file, 0, sizeof(*file));
	for (int i = 0; i < 3; i++) {
		struct zip_entry *entry = &file->entries[i];

		entry->name = names[i];
		entry->name_length = strlen(names[i]);
		entry->header = at;
		entry->offset = (at + ZIP_PUT_LOCAL(entry->name_length) + 63) / 64 * 64;
		entry->bytes = entry->unpacked = sizes[i];
		entry->crc32 = 0x1000u + (unsigned int)i;
		CHECK(zip_put_local(file->bytes + at, entry) > 0);
		at = entry->offset + entry->bytes;
	}
	file->end = (struct zip_end){ .directory = at, .count = 3 };
	for (int i = 0; i < 3; i++)
		at += zip_put_entry(file->bytes + at, &file->entries[i]);
	file->end.length = at - file->end.directory;
	file->size = (size_t)(at + zip_put_end(file->bytes + at, &file->end));
}

/* All steps of reading, in exactly sized copies so that a step too far is seen. */
static int read_all(const struct file *file, struct zip **zip)
{
	size_t tail = file->size < ZIP_TAIL ? file->size : ZIP_TAIL;
	void *copy = malloc(tail + 1);
	struct zip_end end = { 0 };
	int rc;

	memset(&err, 0, sizeof(err));
	*zip = NULL;
	memcpy(copy, file->bytes + file->size - tail, tail);
	rc = zip_find_end(NAME, copy, tail, file->size, &end, &err);
	free(copy);
	if (rc)
		return rc;
	copy = malloc((size_t)end.length);
	memcpy(copy, file->bytes + end.directory, (size_t)end.length);
	rc = zip_parse(NAME, copy, &end, zip, &err);
	free(copy);
	for (size_t i = 0; !rc && i < (*zip)->count; i++) {
		size_t length = zip_local_length(*zip, i);

		copy = malloc(length);
		memcpy(copy, file->bytes + (*zip)->entries[i].header, length);
		rc = zip_check_local(NAME, *zip, i, copy, &err);
		free(copy);
	}
	return rc;
}

/* The file is refused in words, which have this in them. */
static void refused(const struct file *file, const char *words)
{
	struct zip *zip;

	CHECK_EQ(read_all(file, &zip), -EBADMSG);
	CHECK_EQ(err.code, -EBADMSG);
	CHECK_EQ(err.domain, PEN_DOMAIN_FORMAT);
	if (!strstr(err.message, words))
		fprintf(stderr, "\"%s\" has no \"%s\"\n", err.message, words);
	CHECK(strstr(err.message, words) != NULL);
	CHECK(err.hint[0] != 0);
	free(zip);
}

static void put(struct file *file, uint64_t at, uint64_t value, unsigned int size)
{
	zip_put(file->bytes + at, value, size);
}

TEST(what_is_written_is_read)
{
	struct file file;
	struct zip *zip;

	make(&file);
	CHECK_EQ(read_all(&file, &zip), 0);
	CHECK_EQ(zip->count, 3);
	CHECK_EQ(zip->first, 0);
	for (int i = 0; i < 3; i++) {
		CHECK_TEXT(zip->entries[i].name, file.entries[i].name);
		CHECK_EQ(zip->entries[i].header, file.entries[i].header);
		CHECK_EQ(zip->entries[i].offset, file.entries[i].offset);
		CHECK_EQ(zip->entries[i].bytes, file.entries[i].bytes);
		CHECK_EQ(zip->entries[i].crc32, file.entries[i].crc32);
	}
	free(zip);
}

/* 5 GiB at 6 GiB: the numbers are in the extra fields, and the others say so. */
TEST(large_numbers_are_read_as_they_are_written)
{
	struct zip_entry entry = {
		.name = "a/data/0", .name_length = 8, .header = 6ull << 30,
		.offset = (6ull << 30) + 4096, .bytes = 5ull << 30, .unpacked = 5ull << 30,
		.crc32 = 0xdeadbeef,
	};
	struct zip_entry first = { .name = "a/x", .name_length = 3, .offset = 64 };
	unsigned char directory[400], local[200], tail[ZIP_TAIL];
	struct zip_end end = { .directory = 12ull << 30, .count = 2 }, found;
	struct zip *zip;
	size_t length;

	end.length = zip_put_entry(directory, &first);
	end.length += zip_put_entry(directory + end.length, &entry);
	CHECK_EQ(zip_put_end(tail, &end), ZIP_TAIL);
	CHECK_EQ(zip_find_end(NAME, tail, ZIP_TAIL, end.directory + end.length + ZIP_TAIL, &found,
			      &err), 0);
	CHECK_EQ(found.directory, end.directory);
	CHECK_EQ(found.length, end.length);
	CHECK_EQ(zip_parse(NAME, directory, &found, &zip, &err), 0);
	CHECK_EQ(zip->entries[1].header, entry.header);
	CHECK_EQ(zip->entries[1].bytes, entry.bytes);
	length = zip_put_local(local, &entry);
	CHECK_EQ(length, 30 + 8 + 20 + 4);
	CHECK_EQ(zip_check_local(NAME, zip, 1, local, &err), 0);
	CHECK_EQ(zip->entries[1].offset, entry.offset);
	/* A local header that has another large size. */
	local[30 + 8 + 4] ^= 1;
	CHECK_EQ(zip_check_local(NAME, zip, 1, local, &err), -EBADMSG);
	local[30 + 8 + 4] ^= 1;
	/* One whose field is missing. */
	local[30 + 8] = 9;
	CHECK_EQ(zip_check_local(NAME, zip, 1, local, &err), -EBADMSG);
	free(zip);
	/* A directory that says "see the field", and has none, or one that is too short. */
	directory[found.length - 28 - 8] = 0;
	for (int size = 24; size >= 0; size -= 8) {
		length = zip_put_entry(directory, &first);
		zip_put_entry(directory + length, &entry);
		zip_put(directory + found.length - 26, (uint64_t)size, 2);
		CHECK_EQ(zip_parse(NAME, directory, &found, &zip, &err), size == 24 ? 0 : -EBADMSG);
		free(zip);
	}
}

TEST(no_room_for_a_header_is_said)
{
	struct zip_entry entry = { .name = "a/data/0", .name_length = 8, .offset = 41 };
	unsigned char local[200];

	CHECK_EQ(zip_put_local(local, &entry), 0);
	entry.offset = 42;
	CHECK_EQ(zip_put_local(local, &entry), 42);
	entry.offset = 38 + 65535;
	CHECK_EQ(zip_put_local(local, &entry), 42);
	entry.offset++;
	CHECK_EQ(zip_put_local(local, &entry), 0);
}

/* ------------------------------------------------------------------------------- the end -- */

TEST(a_file_without_an_end_is_refused)
{
	struct file file;

	make(&file);
	file.size--;
	refused(&file, "does not end");
	make(&file);
	file.size++;
	refused(&file, "does not end");
	make(&file);
	for (file.size = 0; file.size < 22; file.size++)
		refused(&file, "too short");
}

TEST(ends_that_lie_are_refused)
{
	static const struct {
		int from_end;		/* where, counted from the file's end */
		unsigned int size;
		uint64_t value;
		const char *words;
	} lies[] = {
		{ 2, 2, 1, "does not end" },		/* a comment that is not there */
		{ 18, 2, 1, "several" },		/* number of this disk */
		{ 14, 2, 7, "several" },		/* records on this disk */
		{ 12, 2, 2, "several" },
		{ 10, 4, 9, "contradict" },		/* the directory's size */
		{ 6, 4, 9, "contradict" },		/* and place */
		{ 42 - 8, 8, 1, "not there" },		/* where the large end is */
		{ 42 - 16, 4, 2, "not there" },		/* of how many disks */
		{ 98, 4, 0, "not there" },		/* the large end itself */
		{ 98 - 4, 8, 45, "not there" },		/* its size */
		{ 98 - 24, 8, 2, "contradict" },	/* its numbers of records */
		{ 98 - 32, 8, 4, "contradict" },
	};
	struct file file;

	for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
		make(&file);
		put(&file, file.size - (size_t)lies[i].from_end, lies[i].value, lies[i].size);
		refused(&file, lies[i].words);
	}
}

/* Both ends agree, and are wrong all the same. */
static void lie_twice(struct file *file, const struct zip_end *end)
{
	make(file);
	zip_put_end(file->bytes + file->size - ZIP_PUT_END, end);
	/* The locator is right. */
	put(file, file->size - 34, file->size - ZIP_PUT_END, 8);
}

TEST(directories_that_are_elsewhere_are_refused)
{
	struct file file;
	struct zip_end end;

	make(&file);
	end = file.end;
	end.directory++;
	lie_twice(&file, &end);
	refused(&file, "does not end where");
	end.directory = UINT64_MAX;
	lie_twice(&file, &end);
	refused(&file, "does not end where");
	end = file.end;
	end.directory -= 46;
	end.length += 46;
	lie_twice(&file, &end);
	refused(&file, "no record here");
	end = file.end;
	end.count = 0;
	lie_twice(&file, &end);
	refused(&file, "no records");
	end.count = UINT64_MAX;
	lie_twice(&file, &end);
	refused(&file, "too short for its records");
	end.count = 2;
	lie_twice(&file, &end);
	refused(&file, "more than its records");
}

TEST(a_directory_of_gigabytes_is_refused_before_it_is_read)
{
	unsigned char tail[ZIP_TAIL];
	struct zip_end end = { .directory = 100, .length = 1ull << 40, .count = 1 }, found;

	zip_put_end(tail, &end);
	CHECK_EQ(zip_find_end(NAME, tail, ZIP_TAIL, 100 + (1ull << 40) + ZIP_TAIL, &found, &err),
		 -EBADMSG);
	CHECK(strstr(err.message, "256 MiB") != NULL);
}

/* ------------------------------------------------------------------------------- records -- */

/* Where in the file the directory has record `i`. */
static uint64_t entry_at(const struct file *file, int i)
{
	unsigned char bytes[200];
	uint64_t at = file->end.directory;

	for (int j = 0; j < i; j++)
		at += zip_put_entry(bytes, &file->entries[j]);
	return at;
}

TEST(records_that_lie_are_refused)
{
	static const struct {
		int at;			/* in the directory's entry of record 1 */
		unsigned int size;
		uint64_t value;
		const char *words;
	} lies[] = {
		{ 0, 4, 1, "no record here" },
		{ 8, 2, 0x0801, "encrypted" },
		{ 8, 2, 0x2800, "encrypted" },
		{ 10, 2, 8, "header of another" },	/* compressed, says only the directory */
		{ 16, 4, 77, "another size" },		/* CRC32 */
		{ 20, 4, 99, "two sizes" },
		{ 24, 4, 99, "two sizes" },
		{ 28, 2, 60000, "leaves it" },
		{ 28, 2, 7, "no record here" },
		{ 30, 2, 5, "no sizes" },
		{ 34, 2, 1, "in another file" },
		{ 42, 4, 0, "where another one lies" },
		{ 42, 4, 1, "reaches into" },
		{ 42, 4, 100000, "before the directory" },
		{ 42, 4, 0xffffffff, "no sizes" },
		{ 46, 1, 0, "name that is none" },
		{ 46, 1, 'b', "header of another" },
	};
	struct file file;

	for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
		make(&file);
		put(&file, entry_at(&file, 1) + (uint64_t)lies[i].at, lies[i].value, lies[i].size);
		refused(&file, lies[i].words);
	}
}

TEST(local_headers_that_lie_are_refused)
{
	static const struct {
		int at;
		unsigned int size;
		uint64_t value;
		const char *words;
	} lies[] = {
		{ 0, 4, 0, "no header" },	{ 6, 2, 0, "header of another" },
		{ 8, 2, 8, "header of another" }, { 14, 4, 1, "another size" },
		{ 18, 4, 1, "another size" },	{ 22, 4, 0xffffffff, "another size" },
		{ 26, 2, 7, "header of another" }, { 28, 2, 300, "reaches into" },
		{ 30, 1, 'b', "header of another" },
	};
	struct file file;

	for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
		make(&file);
		put(&file, file.entries[1].header + (uint64_t)lies[i].at, lies[i].value,
		    lies[i].size);
		refused(&file, lies[i].words);
	}
}

TEST(what_overlaps_is_refused)
{
	struct file file;

	/* Record 1 is as large as its header and the directory say, and reaches into record 2. */
	make(&file);
	for (uint64_t at = 18; at <= 22; at += 4)
		put(&file, file.entries[1].header + at, 200, 4);
	for (uint64_t at = 20; at <= 24; at += 4)
		put(&file, entry_at(&file, 1) + at, 200, 4);
	refused(&file, "reaches into what follows");
	/* Record 2 is inside of record 1. */
	make(&file);
	memmove(file.bytes + file.entries[1].offset + 4, file.bytes + file.entries[2].header, 43);
	put(&file, entry_at(&file, 2) + 42, file.entries[1].offset + 4, 4);
	refused(&file, "reaches into what follows");
}

TEST(one_name_for_two_records_is_refused)
{
	struct file file;

	make(&file);
	put(&file, entry_at(&file, 2) + 28, 8, 2);
	put(&file, entry_at(&file, 2) + 32, 1, 2);	/* what is left of the name: a comment */
	memcpy(file.bytes + entry_at(&file, 2) + 46, "a/data/0", 8);
	refused(&file, "is there twice");
}

TEST(bytes_before_the_first_record_are_refused)
{
	struct file file, shifted;
	struct zip_end end;
	uint64_t at;

	make(&file);
	memset(&shifted, 0, sizeof(shifted));
	memcpy(shifted.bytes + 64, file.bytes, file.end.directory);
	at = end.directory = file.end.directory + 64;
	for (int i = 0; i < 3; i++) {
		file.entries[i].header += 64;
		file.entries[i].offset += 64;
		at += zip_put_entry(shifted.bytes + at, &file.entries[i]);
	}
	end.length = at - end.directory;
	end.count = 3;
	shifted.size = (size_t)(at + zip_put_end(shifted.bytes + at, &end));
	refused(&shifted, "does not begin");
}

TEST_MAIN
