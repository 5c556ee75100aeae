/* SPDX-License-Identifier: MIT */
/* Models are cut, named and indexed as the Hugging Face libraries do it. */
#include <errno.h>
#include <stdint.h>
#include "format/index.h"
#include "format/shards.h"
#include "test.h"

static struct pen_error err;

static void check_deal(uint64_t limit, const uint64_t *bytes, const char *expected)
{
	uint32_t files[16];
	char said[64] = "";
	size_t count = strlen(expected), most = 0;

	for (size_t i = 0; i < count; i++)
		if ((size_t)(expected[i] - '0') > most)
			most = (size_t)(expected[i] - '0');
	CHECK_EQ(shards_deal(bytes, count, limit, files), most + 1);
	for (size_t i = 0; i < count; i++)
		said[i] = (char)('0' + files[i]);
	CHECK_TEXT(said, expected);
}

TEST(files_are_filled_in_the_order_of_the_tensors)
{
	check_deal(10, (uint64_t[]){ 6, 6, 2, 6, 2, 2 }, "011222");
	check_deal(10, (uint64_t[]){ 5, 5, 5, 5 }, "0011");
	check_deal(10, (uint64_t[]){ 10, 10, 0, 1 }, "0112");
	check_deal(UINT64_MAX, (uint64_t[]){ UINT64_MAX - 1, 1, 1 }, "001");
	check_deal(10, (uint64_t[]){ 0, 0 }, "00");
}

/* It gets its number at once, the file that was begun only when it is full. */
TEST(a_tensor_above_the_limit_has_a_file_of_its_own)
{
	check_deal(10, (uint64_t[]){ 3, 11, 3, 11, 5 }, "20213");
}

TEST(nothing_at_all_is_one_file)
{
	CHECK_EQ(shards_deal(NULL, 0, 10, NULL), 1);
}

TEST(names_are_known_again)
{
	static const char *const others[] = {
		"model", "model-00001.safetensors", "model-1-of-2.safetensors",
		"model.safetensors.x", "model-00001-of-00002.bin", "amodel.safetensors",
		"model-00001-of-00002-x.safetensors",
		"model-00001-of-00002", "models.safetensors", "", "model--of-.safetensors",
		"model.safetensors.index.json", "model-00001-of-.safetensors",
	};
	char name[SHARDS_NAME_MAX];

	shards_name(0, 1, name);
	CHECK_TEXT(name, "model.safetensors");
	CHECK(shards_is_name(name));
	shards_name(11, 12, name);
	CHECK_TEXT(name, "model-00012-of-00012.safetensors");
	CHECK(shards_is_name(name));
	shards_name(0, 123456, name);
	CHECK_TEXT(name, "model-00001-of-123456.safetensors");
	CHECK(shards_is_name(name));
	for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
		CHECK(!shards_is_name(others[i]));
}

TEST(the_index_is_sorted_and_can_be_read_again)
{
	static const uint64_t shape[] = { 3 };
	const struct pen_save_tensor tensors[] = {
		{ .name = "é", .dtype = PEN_U8, .rank = 1, .shape = shape },
		{ .name = "b", .dtype = PEN_U8, .rank = 1, .shape = shape },
		{ .name = "a\"", .dtype = PEN_U8, .rank = 1, .shape = shape },
	};
	struct pen_save_options options = PEN_SAVE_OPTIONS_INIT;
	struct pen_layout *layout;
	struct index *index;
	char text[1024];

	options.shard_size = 6;
	CHECK_EQ(pen_layout_make(tensors, 3, &options, &layout, &err), 0);
	CHECK_EQ(layout->file_count, 2);
	snprintf(text, sizeof(text), "%.*s", (int)layout->index_size, layout->index);
	CHECK_TEXT(text, "{\n  \"metadata\": {\n    \"total_size\": 9\n  },\n  \"weight_map\": {\n"
			 "    \"a\\\"\": \"model-00002-of-00002.safetensors\",\n"
			 "    \"b\": \"model-00001-of-00002.safetensors\",\n"
			 "    \"\\u00e9\": \"model-00001-of-00002.safetensors\"\n  }\n}\n");
	CHECK_EQ(index_parse("i", layout->index, layout->index_size, &index, &err), 0);
	CHECK_EQ(index->count, 3);
	CHECK_EQ(index->file_count, 2);
	free(index);
	CHECK_TEXT(layout->files[1].name, "model-00002-of-00002.safetensors");
	CHECK_EQ(layout->places[2].file, 1);
	pen_layout_free(layout);
}

TEST(files_of_the_callers_own_are_taken_as_they_are)
{
	static const char *const names[] = { "x.safetensors", "empty.safetensors" };
	struct pen_save_tensor tensor = { .name = "a", .dtype = PEN_U8 };
	struct pen_save_options options = PEN_SAVE_OPTIONS_INIT;
	struct pen_layout *layout;

	options.files = names;
	options.file_count = 2;
	CHECK_EQ(pen_layout_make(&tensor, 1, &options, &layout, &err), 0);
	CHECK_TEXT(layout->files[0].name, "x.safetensors");
	CHECK_EQ(layout->files[1].size, layout->files[1].header_size);
	CHECK(strstr(layout->index, "\"a\": \"x.safetensors\"") != NULL);
	pen_layout_free(layout);
	tensor.file = 2;
	CHECK_EQ(pen_layout_make(&tensor, 1, &options, &layout, &err), -EINVAL);
	tensor.file = 0;
	options.shard_size = 5;
	CHECK_EQ(pen_layout_make(&tensor, 1, &options, &layout, &err), -EINVAL);
}

TEST_MAIN
