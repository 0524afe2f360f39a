"""A little ordinary English for the vocabulary: what people type is not only what the generators say."""

COMMON = """
a able about above across act add after again against age ago air all almost alone along already also although always am among an
and animal another answer any anything appear are area arm around arrive as ask at away baby back bad bag ball bank bar base be
bear beat beautiful because become bed been before began begin behind being believe below best better between big bird black blue
board boat body book born both box boy bread break bring brother brought brown build but buy by call came can car care carry case
cat catch cause cell center certain chair chance change check child children choose city class clean clear close cold color come
common complete computer contain continue control cook cool copy corner correct cost could count country course cover create cross
cry cup cut dark data day dead deal decide deep describe did die different difficult dinner do doctor does dog done door down draw
dream dress drink drive drop dry during each ear early earth east easy eat edge effect egg eight either else end enough enter equal
even evening ever every example explain eye face fact fall family far farm fast father feel feet few field fight figure fill final
find fine finger finish fire first fish five floor flower fly follow food foot for force forest form forward found four free fresh
friend from front fruit full game garden gave general get girl give glass go gold gone good got great green grew ground group grow
guess had hair half hand happen happy hard has hat have he head hear heard heart heat heavy held hello help her here high him his
history hit hold hole home hope horse hot hour house how human hundred hurry idea if image important in inside into is island it
its job join jump just keep kept key kind king knew know known lady land language large last late laugh law lay lead learn least
leave left leg length less let letter level lie life light like line list listen little live long look lost lot love low machine
made main make man many map mark market matter may me mean measure meat meet men might mile mind minute miss model moment money
month moon more morning most mother mountain mouth move much music must my name near need never new news next nice night nine no
none noon north nose not note nothing notice now number object ocean of off office often oh old on once one only open or order
other our out outside over own page paint pair paper parent part party pass past pay people perhaps person phone picture piece
place plan plane plant play please point poor possible power prepare press pretty price print problem produce program pull push
put question quick quiet quite race rain ran reach read ready real reason record red remember repeat reply rest result return rich
ride right ring rise river road rock room round rule run said sail salt same sand sat save saw say school science sea season seat
second see seem seen sell send sentence serve set seven several shall shape she ship shoe shop short should show side sign simple
since sing sister sit six size skin sky sleep slow small smile snow so soft some something song soon sorry sound south space speak
special spell spend spoke spring stand star start state stay step still stone stood stop store story street strong student study
such sugar summer sun sure surface swim system table take talk tall tea teach teacher tell ten test than thank that the their them
then there these they thing think third this those though thought thousand three through time tiny to today together told tomorrow
too took top total touch toward town train travel tree tried trip true try turn two type under understand until up us use usual
value very view visit voice wait walk wall want war warm was wash watch water way we wear weather week weight well went were west
what wheel when where whether which while white who whole why wide will wind window winter wish with without woman wonder wood word
work world would write wrong yard year yellow yes yesterday yet you young your zero
"""
"""Common words, each once."""

TEXT = """
The harbor was quiet when the first boats came in. A girl counted them from the wall: one, two, three, and then the small one that
her father had built. "They are all here," she said, and ran down to tell the others. It's not that she didn't trust them; she had
only wanted to see it herself. Her brother asked why she was laughing, and she said that nobody laughs for a reason in the morning.

How does a small model learn? It reads many short examples, and after each one it changes a little. Most of what it knows is how
words follow one another; some of it is how to look back and copy what it needs. It cannot know the news, and it shouldn't guess.
We'll write a function, for example:

    def add(first: int, second: int) -> int:
        total = first + second
        return total

    for item in range(10):
        if item % 2 == 0:
            print("even", item)

{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
"""
"""A few paragraphs."""
