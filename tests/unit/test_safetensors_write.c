/* SPDX-License-Identifier: MIT */
/*
 * Headers as the safetensors package writes them: what the reader (safetensors.c) makes of them,
 * and some to the letter. The Python tests compare many more with the package itself.
 */
#include <errno.h>
#include <stdint.h>
#include "format/json_write.h"
#include "format/safetensors.h"
#include "penstock.h"
#include "test.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static struct pen_error err;
static struct pen_layout *layout;
static const uint64_t shape[] = { 2, 3, 0, UINT64_MAX };

/* The text of the header of the first file, without the spaces at its end. */
static const char *header(void)
{
	static char text[4096];
	size_t length = layout->files[0].header_size - 8;

	CHECK(length < sizeof(text));
	memcpy(text, (const char *)layout->files[0].header + 8, length);
	while (length && text[length - 1] == ' ')
		length--;
	text[length] = 0;
	return text;
}

static int make(const struct pen_save_tensor *tensors, size_t count,
		const struct pen_save_options *options)
{
	int rc;

	pen_layout_free(layout);
	rc = pen_layout_make(tensors, count, options, &layout, &err);
	CHECK(!rc == !!layout && (rc >= 0 || err.message[0]));
	return rc;
}

TEST(tensors_lie_by_kind_and_then_by_name)
{
	const struct pen_save_tensor tensors[] = {
		{ .name = "b", .dtype = PEN_U8, .rank = 1, .shape = shape + 1 },
		{ .name = "c", .dtype = PEN_I64, .rank = 2, .shape = shape },
		{ .name = "a", .dtype = PEN_U8, .rank = 0 },
		{ .name = "d", .dtype = PEN_F32, .rank = 3, .shape = shape },
	};

	CHECK_EQ(make(tensors, 4, NULL), 0);
	CHECK_TEXT(header(),
		   "{\"c\":{\"dtype\":\"I64\",\"shape\":[2,3],\"data_offsets\":[0,48]},"
		   "\"d\":{\"dtype\":\"F32\",\"shape\":[2,3,0],\"data_offsets\":[48,48]},"
		   "\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[48,49]},"
		   "\"b\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[49,52]}}");
	CHECK_EQ(layout->files[0].header_size % 8, 0);
	CHECK_EQ(layout->files[0].size, layout->files[0].header_size + 52);
	CHECK_EQ(layout->places[0].offset, layout->files[0].header_size + 49);
	CHECK_EQ(layout->places[1].offset, layout->files[0].header_size);
	CHECK_EQ(layout->files[0].tensor_count, 4);
	CHECK_EQ(layout->files[0].tensors[0], 1);
	CHECK_EQ(layout->files[0].tensors[3], 0);
	CHECK_EQ(layout->bytes, 52);
	CHECK(!layout->index && !layout->files[0].name);
	pen_layout_free(layout);
}

TEST(metadata_comes_first_and_none_is_not_empty)
{
	const struct pen_metadata pairs[] = { { .key = "k\"", .value = "\\\n\x01\x7fä" },
					      { .key = "", .value = "a\0b", .value_length = 3 } };
	struct pen_save_options options = PEN_SAVE_OPTIONS_INIT;
	const struct pen_save_tensor none = { .name = "e", .dtype = PEN_BOOL, .rank = 1,
					      .shape = shape + 2 };

	CHECK_EQ(make(NULL, 0, &options), 0);
	CHECK_TEXT(header(), "{}");
	options.metadata = pairs;
	CHECK_EQ(make(NULL, 0, &options), 0);
	CHECK_TEXT(header(), "{\"__metadata__\":{}}");
	options.metadata_count = 2;
	CHECK_EQ(make(&none, 1, &options), 0);
	CHECK_TEXT(header(), "{\"__metadata__\":{\"k\\\"\":\"\\\\\\n\\u0001\x7fä\","
			     "\"\":\"a\\u0000b\"},\"e\":{\"dtype\":\"BOOL\",\"shape\":[0],"
			     "\"data_offsets\":[0,0]}}");
	pen_layout_free(layout);
}

TEST(the_header_is_filled_up_to_any_alignment)
{
	char name[40] = "";
	struct pen_save_tensor tensor = { .name = name, .dtype = PEN_F64, .rank = 1,
					  .shape = shape };
	struct pen_save_options options = PEN_SAVE_OPTIONS_INIT;

	for (unsigned int length = 0; length < 39; length++) {
		name[length] = 'n';
		for (options.align = 8; options.align <= 1 << 20; options.align *= 2) {
			struct safetensors *table;
			uint64_t text;

			CHECK_EQ(make(&tensor, 1, &options), 0);
			text = layout->files[0].header_size - 8;
			CHECK_EQ(layout->files[0].header_size % options.align, 0);
			CHECK(options.align > 4096 || layout->files[0].header_size <= 4096);
			CHECK(!memcmp(layout->files[0].header, &text, 8));
			CHECK_EQ(safetensors_parse("x", (const char *)layout->files[0].header + 8,
						   text, layout->files[0].size, &table, &err), 0);
			CHECK_EQ(table->count, 1);
			CHECK_EQ(table->tensors[0].offset, layout->places[0].offset);
			CHECK_TEXT(table->tensors[0].name, name);
			free(table);
		}
	}
	pen_layout_free(layout);
}

TEST(what_no_reader_would_take_is_refused_in_words)
{
	static const struct pen_save_tensor bad[] = {
		{ .name = NULL, .dtype = PEN_U8 },
		{ .name = "__metadata__", .dtype = PEN_U8 },
		{ .name = "no UTF-8: \xff", .dtype = PEN_U8 },
		{ .name = "half a letter: \xc3", .dtype = PEN_U8 },
		{ .name = "half a pair: \xed\xa0\x80", .dtype = PEN_U8 },
		{ .name = "kind", .dtype = PEN_DTYPES },
		{ .name = "kind", .dtype = -1 },
		{ .name = "half a byte", .dtype = PEN_F4, .rank = 1, .shape = shape + 1 },
		{ .name = "too large", .dtype = PEN_F64, .rank = 1, .shape = shape + 3 },
		{ .name = "no shape", .dtype = PEN_F64, .rank = 1 },
	};
	static const uint64_t aligns[] = { 1, 4, 12, 4097, 1 << 21, UINT64_MAX };
	const struct pen_save_tensor twice[] = { { .name = "t", .dtype = PEN_U8 },
						 { .name = "s", .dtype = PEN_U8 },
						 { .name = "t", .dtype = PEN_F32 } };
	struct pen_save_options options = PEN_SAVE_OPTIONS_INIT;

	for (size_t i = 0; i < COUNT(bad); i++)
		CHECK_EQ(make(&bad[i], 1, NULL), -EINVAL);
	CHECK_EQ(make(twice, 3, NULL), -EINVAL);
	CHECK(strstr(err.message, "two tensors") && !strcmp(err.object, "t"));
	for (size_t i = 0; i < COUNT(aligns); i++) {
		options.align = aligns[i];
		CHECK_EQ(make(twice, 2, &options), -EINVAL);
		CHECK(strstr(err.hint, "4096"));
	}
	options.size = 0;
	CHECK_EQ(make(twice, 2, &options), -EINVAL);
}

TEST(texts_are_escaped_as_serde_json_and_as_python_do)
{
	static const struct {
		const char *text, *plain, *ascii;
	} cases[] = {
		{ "a\"b\\c/", "\"a\\\"b\\\\c/\"", "\"a\\\"b\\\\c/\"" },
		{ "\b\f\n\r\t\x01\x1f", "\"\\b\\f\\n\\r\\t\\u0001\\u001f\"",
		  "\"\\b\\f\\n\\r\\t\\u0001\\u001f\"" },
		{ "\x7f é 名 \xf0\x9f\x98\x80", "\"\x7f é 名 \xf0\x9f\x98\x80\"",
		  "\"\\u007f \\u00e9 \\u540d \\ud83d\\ude00\"" },
	};

	for (size_t i = 0; i < COUNT(cases); i++)
		for (int ascii = 0; ascii < 2; ascii++) {
			struct json_text json = { .bytes = NULL };

			json_quote(&json, cases[i].text, strlen(cases[i].text), ascii);
			json_put(&json, "", 1);
			CHECK_EQ(json.rc, 0);
			CHECK_TEXT(json.bytes, ascii ? cases[i].ascii : cases[i].plain);
			free(json.bytes);
		}
}

TEST_MAIN
